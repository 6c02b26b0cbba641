"""Batch jobs: scripts, batch systems, and the jobs that this user has submitted."""
