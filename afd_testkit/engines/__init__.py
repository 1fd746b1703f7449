"""Engines that a gate can drive, behind one Protocol (``base.PrefillEngine``)."""
