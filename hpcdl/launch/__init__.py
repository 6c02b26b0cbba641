"""Start the ranks of a run, and restart them after losses."""
