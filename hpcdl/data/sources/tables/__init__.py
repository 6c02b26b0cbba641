"""Sources that are tables."""
