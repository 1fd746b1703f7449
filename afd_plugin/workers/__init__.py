"""Thin vLLM workers; what they share is in ``runner``."""
