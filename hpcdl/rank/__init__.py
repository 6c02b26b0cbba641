"""One rank of a run: how a process becomes a rank, its training loop and its record."""
