"""Faults on purpose, to see what a run survives: what is injected into ranks and into their network."""
