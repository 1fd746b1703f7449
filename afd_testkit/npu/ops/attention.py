"""Reference operators: attention."""
