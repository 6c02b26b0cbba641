"""Feed one file, read once, to a program on every node: `python -m hpcdl.comm.mpi.spread FILE RANKS COMMAND...` a rank.

Rank 0 reads FILE and broadcasts it block by block; each rank writes the blocks to COMMAND's standard input. Little more
than mpi4py is imported: thousands of nodes start this from the shared file system whose load it should reduce.
"""

from __future__ import annotations

import array
import contextlib
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

from hpcdl.comm.mpi.library import readable_lines

BLOCK_BYTES = 16 * 1024**2
STARTED = "spread: all ranks are there"
"""Rank 0's first output: later failures are those of a node, not of the launcher."""


def spread(communicator: Any, source: IO[bytes] | None, target: IO[bytes]) -> None:
    """Copy rank 0's `source` to every rank's `target`; a target closed by its reader gets no more."""
    block, length = bytearray(BLOCK_BYTES), array.array("q", [0])
    heard = True
    while True:
        if source is not None:
            length[0] = _filled(source, block)
        # Every rank must know the length of the broadcast that follows.
        communicator.Bcast(length, root=0)
        if not length[0]:
            return
        view = memoryview(block)[: length[0]]
        communicator.Bcast(view, root=0)
        if heard:  # a rank without a reader stays in the broadcasts: they need every rank
            try:
                target.write(view)
            except BrokenPipeError:
                heard = False


def _filled(source: IO[bytes], block: bytearray) -> int:
    """Fill `block` and return the number of bytes: less than its length only at the end, even from a pipe."""
    view, num_read = memoryview(block), 0
    while num_read < len(block) and (count := source.readinto(view[num_read:])):  # type: ignore[attr-defined]
        num_read += count
    return num_read


def main() -> int:
    """Entry point of each rank; returns 1 if COMMAND fails on any of them."""
    file, ranks, *command = sys.argv[1:]
    import mpi4py

    mpi4py.rc.thread_level = "single"
    with readable_lines():
        from mpi4py import MPI

    communicator = MPI.COMM_WORLD
    if communicator.Get_size() != int(ranks):
        print(f"{ranks} ranks were asked for, {communicator.Get_size()} are one job", file=sys.stderr)
        return 1
    with contextlib.ExitStack() as files:
        source = files.enter_context(Path(file).open("rb", buffering=0)) if communicator.Get_rank() == 0 else None
        communicator.Barrier()  # STARTED is true only once all ranks are there
        if source is not None:
            print(STARTED, flush=True)
        program = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert program.stdin is not None
        spread(communicator, source, program.stdin)
        with contextlib.suppress(BrokenPipeError):
            program.stdin.close()
    failed = array.array("q", [int(program.wait() != 0)])
    communicator.Allreduce(MPI.IN_PLACE, failed)  # all errors are printed before a launcher ends the others
    return 1 if failed[0] else 0


if __name__ == "__main__":
    sys.exit(main())
