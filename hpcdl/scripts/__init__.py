"""Support for hpcdl in the user's own Keras script."""
