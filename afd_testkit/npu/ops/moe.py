"""Reference operators: moe."""
