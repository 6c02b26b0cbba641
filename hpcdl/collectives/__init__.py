"""All-reduces, one file each: numpy and the Communicator protocol, no TensorFlow."""
