"""Commands for data: shards and what is in them."""
