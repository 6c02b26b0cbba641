"""Control messages without MPI: an authenticated star around rank 0."""
