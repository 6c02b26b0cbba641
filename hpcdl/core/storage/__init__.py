"""Files: made, replaced and removed in one place, locked, read, and kept in archives."""
