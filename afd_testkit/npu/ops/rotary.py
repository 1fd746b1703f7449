"""Reference operators: rotary."""
