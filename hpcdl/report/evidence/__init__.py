"""Scaling evidence for a centre: a template of its criteria, the measurements, and the document."""
