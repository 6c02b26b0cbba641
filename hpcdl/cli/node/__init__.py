"""Commands for a node: what it has, and its best setting."""
