"""Quadratic forms of a loss Hessian along many directions. Pure PyTorch: knows no runs, no files, no Llama."""
