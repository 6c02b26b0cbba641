"""Shared parts of the formats: the list of samples, fields, folders, and names that mean splits."""
