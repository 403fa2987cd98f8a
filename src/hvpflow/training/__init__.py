"""Training a recipe into a run directory."""
