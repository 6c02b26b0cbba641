"""The MPI ranks of test_parity.py: `python parity_ranks.py FOLDER`; rank 0 writes FOLDER/result.json.

Each rank represents a node. For each mode of --background it copies its state during steps, the node of one rank is
lost, and new ranks restore it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy

from hpcdl.checkpoint.background import GAPS, OFF, THREAD, BackgroundWork
from hpcdl.checkpoint.folders import Snapshot
from hpcdl.checkpoint.memory import LocalCopies, names_of, recover
from hpcdl.checkpoint.parity import PARTNER, XOR, GroupParity
from hpcdl.comm.mpi.communicator import world
from hpcdl.comm.observed import Observed, observe

EVERY, STEPS, STEP_S = 10, 30, 0.01
LOST = 1
LENGTH = 700_000
"""Of rank 0's weights: several slices for each of the others."""


def snapshot(step: int, rank: int, size: int) -> Snapshot:
    values = numpy.random.default_rng([step, rank])
    shared = {"weights/0": values.random(LENGTH, numpy.float32)} if rank == 0 else {}
    own = {"totals": values.random(3), "seeds/0": values.random(1000 * (rank + 1))}
    return Snapshot(step=step, shared=shared, own=own, facts={"ranks": size})


def one_step(group: Observed) -> None:
    """Compute on the last rank while the others wait for it."""
    last = group.size - 1
    mine, theirs = numpy.ones(1000), numpy.zeros(1000)
    if group.rank == last:
        time.sleep(STEP_S)
        for request in [group.isend(mine, rank) for rank in range(last)]:
            request.wait()
    else:
        group.irecv(theirs, last).wait()
    group.barrier()


def case(group: Observed, folder: Path, redundancy: str, way: str) -> dict[str, Any]:
    """Return the messages and results of one rank."""
    rank, reported = group.rank, []
    place = folder / f"{redundancy}-{way}" / group.host
    place.parent.mkdir(exist_ok=True)
    work = BackgroundWork(way, group.monitor, reported.append)

    def copies() -> LocalCopies:
        keeps = GroupParity(group, redundancy, reported.append, most_patience_s=0.5)
        return LocalCopies(place, folder, rank, EVERY, reported.append, work, keeps)

    made = copies()
    for step in range(1, STEPS + 1):
        one_step(group)
        if made.due(step):
            made.wait()
            made.start(snapshot(step, rank, group.size), 1.0)
    made.wait()
    group.barrier()
    files = [place / names_of(STEPS).replace("*", f"rank-{rank}.{suffix}") for suffix in ("npz", "json")]
    before = [path.read_bytes() for path in files]
    if rank == LOST:
        shutil.rmtree(place)
    group.barrier()
    again = copies()
    recover(place, group, 0, reported.append)
    whole = again.whole()
    same = whole[:1] == [STEPS] and before == [path.read_bytes() for path in files]
    return {
        "same": same,
        "whole": whole,
        "said": reported,
        "spent": vars(work.spent),
        "under_way": len(group.monitor.waits()),
    }


def main() -> None:
    inner = world()
    try:
        names = os.uname()
        os.uname = lambda: os.uname_result((names[0], f"node{inner.rank}", *names[2:]))
        group = observe(inner.duplicate())
        folder = Path(sys.argv[1])
        cases = [(redundancy, way) for redundancy in (XOR, PARTNER) for way in (GAPS, THREAD, OFF)]
        found = {f"{redundancy}-{way}": case(group, folder, redundancy, way) for redundancy, way in cases}
        gathered = group.allgather_json(found)
        if group.rank == 0:
            (folder / "result.json").write_text(json.dumps(gathered))
        group.barrier()
    except BaseException:  # the others must not wait for this one
        traceback.print_exc()
        inner.abort(1)
        raise


if __name__ == "__main__":
    main()
