"""Checks of a node before a run: one file per topic, one table of all checks."""
