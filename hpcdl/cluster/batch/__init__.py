"""Jobs: scripts, batch systems, and what this user has submitted."""
