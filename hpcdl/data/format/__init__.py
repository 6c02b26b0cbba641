"""The shard format: bytes, checksums and manifest (docs/reference/shard-format.md)."""
