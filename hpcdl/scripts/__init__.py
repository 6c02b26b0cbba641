"""hpcdl in a user's own Keras script."""
