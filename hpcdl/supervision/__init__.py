"""What watches a run: heartbeats, pace, safety, control flags, live state, output."""
