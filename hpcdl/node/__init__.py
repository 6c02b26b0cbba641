"""One node: its topology, the placement of ranks on it, and its fastest settings."""
