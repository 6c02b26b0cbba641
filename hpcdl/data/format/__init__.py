"""What a shard is: its bytes, checksums and manifest (docs/shard-format.md)."""
