"""The step, the loop, and what a run leaves behind."""
