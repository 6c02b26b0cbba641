"""Save the state of a run as arrays, and restore it."""
