"""TensorFlow's own engines over gRPC, without MPI; for comparison."""
