"""A distributed `fit`: metrics, learning rates and files."""
