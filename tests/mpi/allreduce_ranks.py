"""The MPI ranks of test_collectives.py: `python allreduce_ranks.py RESULT [dies]`; rank 0 writes RESULT."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy

from hpcdl.collectives import auto
from hpcdl.collectives.slices import Workspace
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.arithmetic import add_bfloat16, from_bfloat16, to_bfloat16
from hpcdl.comm.mpi.communicator import MpiCommunicator, world
from hpcdl.comm.mpi.library import library_path

LENGTHS = {"float32": (0, 1, 7, 1000, 600_007), "float64": (5, 10_003)}
"""The longest is several slices long."""


def values(rank: int, length: int, dtype: str) -> Any:
    return numpy.random.default_rng([rank, length]).random(length, numpy.float32).astype(dtype)


def all_algorithms(communicator: MpiCommunicator, names: Iterable[str]) -> dict[str, Any]:
    """Return greatest error (in units of the last place of 1) and digest of each algorithm, and bfloat16's error."""
    ranks = range(communicator.size)
    own = {(kind, n): values(communicator.rank, n, kind) for kind, lengths in LENGTHS.items() for n in lengths}
    exact = {(kind, n): sum(values(rank, n, kind).astype(numpy.float64) for rank in ranks) for kind, n in own}
    found = {}
    for name in names:
        workspace = Workspace()
        digest, error = hashlib.sha256(), 0.0
        for key, mine in own.items():
            buffer = mine.copy()
            COLLECTIVES.load(name)(communicator, buffer, workspace)
            error = max(error, float(numpy.abs(buffer - exact[key]).max(initial=0) / numpy.finfo(key[0]).eps))
            digest.update(buffer.tobytes())
        halves = to_bfloat16(own["float32", 1000])
        COLLECTIVES.load(name)(communicator, halves, workspace, add_bfloat16)
        half_error = float(numpy.abs(from_bfloat16(halves) - exact["float32", 1000]).max())
        digest.update(halves.tobytes())
        workspace.close()
        found[name] = {"error": error, "half_error": half_error, "digest": digest.hexdigest()}
    return found


def basics(communicator: MpiCommunicator) -> dict[str, Any]:
    """Check groups, shared memory, JSON, first come first served, wide messages."""
    rank, size = communicator.rank, communicator.size
    group = communicator.split(rank % 2, -rank)
    shared: Any = communicator.shared_array((size, 3), numpy.int64)
    shared[rank] = rank + 1
    communicator.barrier()
    other = communicator.duplicate()
    buffer = numpy.zeros((2, 2), numpy.complex128)
    if rank == 0:
        buffer[:] = 1j
    other.broadcast(buffer)
    requests = [communicator.irecv(numpy.zeros(1, numpy.float16), source, tag=3) for source in range(size)]
    sends = [communicator.isend(numpy.ones(1, numpy.float16), target, tag=3) for target in range(size)]
    first = communicator.wait_any(requests)
    for request in [*requests, *sends]:
        request.wait()
    result = {
        "json": communicator.allgather_json({"rank": rank, "text": "ü" * rank}),
        "group": group.allgather_json(rank),
        "shared": int(shared.sum()),
        "broadcast": bool((buffer == 1j).all()),
        "first_in_range": 0 <= first < size,
        "library": communicator.library,
        "library_path": library_path(),
    }
    other.free()
    group.free()
    return result


def die(communicator: MpiCommunicator) -> None:
    """Kill rank 1 in the middle of an endless exchange."""
    workspace = Workspace()
    buffer = numpy.ones(300_000, numpy.float32)
    for step in range(10**9):
        if step == 5 and communicator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        COLLECTIVES.load("ring")(communicator, buffer, workspace)
        buffer.fill(1)


def main() -> None:
    communicator = world()
    auto.SIZES = (4096, 65536)
    try:
        if "dies" in sys.argv:
            die(communicator)
        result = {"basics": basics(communicator), "one_node": all_algorithms(communicator, COLLECTIVES)}
        # Two simulated nodes: only ranks with equal host names share memory.
        communicator.host = f"node{communicator.rank // 2}"
        result["two_nodes"] = all_algorithms(communicator, ["hierarchical"])
        results = communicator.allgather_json(result)
        if communicator.rank == 0:
            Path(sys.argv[1]).write_text(json.dumps(results))
    except BaseException:  # noqa: BLE001  the other ranks must not wait for this one
        traceback.print_exc()
        communicator.abort(1)


if __name__ == "__main__":
    main()
