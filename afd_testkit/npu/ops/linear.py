"""Reference operators: linear."""
