"""One node: what is in it, how ranks sit on it, and which settings are fastest there."""
