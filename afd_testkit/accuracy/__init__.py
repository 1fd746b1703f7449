"""Accuracy of split against unsplit runs: problems, the small model that answers them, verdict."""
