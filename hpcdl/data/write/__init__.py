"""`hpcdl shard`: list a source, plan, write in parallel; repair shards."""
