"""The content of a data folder, counted and drawn on one page."""
