"""How ranks talk: mpi (between processes), threads (ranks in one process), tcp (control messages without MPI)."""
