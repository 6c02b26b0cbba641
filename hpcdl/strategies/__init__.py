"""How workers agree on weights: one file per strategy; every all-reduce of collectives/ is a strategy too."""
