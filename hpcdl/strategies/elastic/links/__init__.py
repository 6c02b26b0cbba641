"""A worker's ways to the center: messages, shared memory, one-sided updates."""
