"""How workers agree: one file per strategy; every all-reduce of collectives/ is a strategy too."""
