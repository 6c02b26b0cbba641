"""Ranks as MPI processes; the only room that uses mpi4py."""
