"""From settings to ranks: checks, the run directory, the start."""
