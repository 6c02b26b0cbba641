"""What ranks that serve do: numpy and a communicator, no TensorFlow."""
