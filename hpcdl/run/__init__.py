"""What a run is before it starts: its plan, its directory, its journal."""
