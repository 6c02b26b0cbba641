"""Injected faults, to test what a run survives: faults of ranks and of their network."""
