"""What every rank of a run shares, `hpcdl train` and a user's script alike: start, agree, watch, compare."""
