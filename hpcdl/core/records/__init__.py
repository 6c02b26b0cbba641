"""Records of runs, and their JSON."""
