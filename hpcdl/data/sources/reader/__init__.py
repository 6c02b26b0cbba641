"""Sources that a reader of the user's own gives."""
