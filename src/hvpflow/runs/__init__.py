"""Run directories: recipes, checkpoints, positions. Reads every format, computes nothing."""
