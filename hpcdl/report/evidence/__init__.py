"""Scaling evidence for a centre: a template of what it asks for, what was measured, and the document."""
