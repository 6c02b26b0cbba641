"""Ranks as MPI processes; the only package that uses mpi4py."""
