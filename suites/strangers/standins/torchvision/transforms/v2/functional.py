"""Imported, never used."""
