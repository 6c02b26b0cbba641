"""From shards to the batches of every rank: order, reading, staging, TensorFlow."""
