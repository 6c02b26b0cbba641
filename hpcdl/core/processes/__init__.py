"""Processes, their signals, streams and clock."""
