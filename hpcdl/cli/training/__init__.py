"""Commands for a run: start it, watch it, look into it, use what it has learnt."""
