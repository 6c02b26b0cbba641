"""Settings: their declarations (schema), and the origin of each value (load)."""
