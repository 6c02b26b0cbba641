"""Commands for a run: start it, watch it, inspect it, use its trained model."""
