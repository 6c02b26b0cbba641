"""Supervision of a run: heartbeats, pace, safety, control flags, live state, output."""
