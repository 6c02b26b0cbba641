"""A worker's steps, from the first batch to the record."""
