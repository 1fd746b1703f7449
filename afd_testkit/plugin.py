"""pytest hooks of the testkit."""
