"""A distributed `fit`: its callbacks, metrics, learning rates and files."""
