"""Commands for an installation: its jobs, its health, and its models, strategies and examples."""
