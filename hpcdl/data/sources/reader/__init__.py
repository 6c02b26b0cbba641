"""Sources that are read by a user's own reader."""
