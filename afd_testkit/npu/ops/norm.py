"""Reference operators: norm."""
