"""A run before it starts: its plan, its directory, its journal."""
