"""The timeline of a step at sizes that have not been run."""
