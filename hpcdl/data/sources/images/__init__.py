"""Sources that are files of images."""
