"""What a shard is: its bytes, checksums and manifest (docs/reference/shard-format.md)."""
