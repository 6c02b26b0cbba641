"""Communication between ranks: mpi (processes), threads (ranks in one process), tcp (control messages without MPI)."""
