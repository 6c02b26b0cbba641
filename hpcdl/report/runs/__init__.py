"""What a report reads: records, searches, published points."""
