"""Synchronous SGD by all-reduce; every algorithm of collectives/ is a strategy of the same name."""
