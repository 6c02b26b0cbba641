"""One rank of a run: how it becomes one, its loop, its record."""
