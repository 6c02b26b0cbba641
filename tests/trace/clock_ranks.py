"""Ranks with shifted and drifting clocks that pass a message around; also run as MPI ranks.

`python clock_ranks.py FOLDER BEGAN` under mpiexec; FOLDER receives the ranks' files and truth.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy

from hpcdl.comm.observed import observe
from hpcdl.core.protocols import Communicator
from hpcdl.trace.recorder import TraceRecorder

TURNS = 40
SHIFTS = ((0.0, 0.0), (2.0, 50e-6), (-2.0, -50e-6), (0.5, 20e-6), (2.0, 50e-6), (1000.0, 100e-6))
"""By rank: seconds that its clock is ahead, and seconds that it gains per second."""


def shifted(rank: int, began_s: float) -> Callable[[], float]:
    ahead_s, drift = SHIFTS[rank]
    return lambda: began_s + (time.monotonic() - began_s) * (1 + drift) + ahead_s


def passed_around(group: Communicator, folder: Path, began_s: float, *, same: tuple[int, ...] = ()) -> list[float]:
    """Pass a message around; each rank records when it had it on its own clock. Return the true times."""
    clock = shifted(group.rank, began_s)
    identity = "one clock" if group.rank in same else f"clock {group.rank}"
    facts = {"rank": group.rank, "size": group.size, "host": group.host, "role": "worker"}
    recorder = TraceRecorder("steps", folder, clock=clock, identity=identity, **facts)
    observed = observe(group)
    recorder.quiesced(observed, last=True)
    word, true_s = numpy.zeros(1), []
    for turn in range(TURNS):
        if group.rank or turn % 20:
            group.irecv(word, (group.rank - 1) % group.size, 1).wait()
        own_s = clock()
        recorder.span("had it", own_s, own_s, bucket=turn)
        ahead_s, drift = SHIFTS[group.rank]
        true_s.append(began_s + (own_s - ahead_s - began_s) / (1 + drift))
        time.sleep(0.002)
        if turn % 20 < 19 or group.rank < group.size - 1:
            group.isend(word, (group.rank + 1) % group.size, 1).wait()
        if turn % 20 == 19:
            recorder.quiesced(observed, last=True)
    recorder.close()
    return true_s


def main() -> None:
    """Run one rank."""
    from hpcdl.comm.mpi.communicator import finalize, world

    group, folder = world(), Path(sys.argv[1])
    truth = group.allgather_json(passed_around(group, folder, float(sys.argv[2])))
    if group.rank == 0:
        (folder / "truth.json").write_text(json.dumps(truth))
    finalize()


if __name__ == "__main__":
    main()
