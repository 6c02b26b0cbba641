"""Collectives of a script, on arrays and tensors, over all ranks or some of them."""
