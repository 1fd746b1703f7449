"""Reference operators: cache."""
