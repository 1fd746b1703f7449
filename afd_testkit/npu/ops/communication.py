"""Reference operators: communication."""
