"""Files: created, replaced and removed in one place; locks, bounded reading, and archives."""
