"""The state of a run as arrays, on disk and back."""
