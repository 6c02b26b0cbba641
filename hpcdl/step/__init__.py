"""One step: forward, backward, update, and what is measured of it."""
