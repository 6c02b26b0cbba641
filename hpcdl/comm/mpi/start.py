"""From which memory MPI starts. Imports nothing of hpcdl: thousands of nodes load this with spread.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def with_own_heap(call: Callable[[], object]) -> None:
    """Call `call`, which loads the MPI library or starts MPI; under `srun --mpi=pmi2` in a thread of its own.

    MPICH 5 tells the other ranks 4 KB where UCX's address has 100 bytes: it reads on into the heap. Slurm takes lines
    of 1,023 bytes, and only zeros are sent shortened. Behind a heap that Python has used for a while lines get longer,
    and ranks fail or wait for ever. A new thread has a new heap; what the library allocates as it is loaded must be
    there too, for what this thread frees it gets again.
    """
    if "PMI_FD" in os.environ and "SLURM_JOB_ID" in os.environ:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result()
    else:
        call()
