"""Checks of a node before a run: one file per check, in hpcdl/doctor/table.py."""
