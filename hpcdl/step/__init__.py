"""One training step: forward, backward, update, and its measurements."""
