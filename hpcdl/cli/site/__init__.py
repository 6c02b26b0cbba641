"""Commands for an installation: its jobs, its health, what it offers."""
