"""A rank that joins the others after its process has filled its heap, and freed every second block of it."""

from __future__ import annotations

import ctypes
import os

from hpcdl.comm.mpi.communicator import finalize, world


def use_the_heap() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = []
    for size in range(16, 70_000, 16):
        blocks.append(libc.malloc(size))
        ctypes.memmove(blocks[-1], os.urandom(size), size)
    for block in blocks[::2]:
        libc.free(block)


if __name__ == "__main__":
    use_the_heap()
    everybody = world()
    everybody.barrier()
    if everybody.rank == 0:
        print(f"{everybody.size} ranks have met")
    finalize()
