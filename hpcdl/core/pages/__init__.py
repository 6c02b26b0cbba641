"""Pages: HTML, its colours, the manual, examples."""
