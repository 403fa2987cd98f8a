"""Token caches, the order of sequences, and text made into tokens. Knows no model and no run."""
