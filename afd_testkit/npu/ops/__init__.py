"""Reference operators in plain PyTorch, one file a family."""
