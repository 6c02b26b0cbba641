"""A distributed `fit`: its metrics, learning rates and files."""
