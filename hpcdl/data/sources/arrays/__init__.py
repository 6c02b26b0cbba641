"""Sources that hold arrays."""
