"""The measured links between neighbouring nodes of a job: `python -m hpcdl.doctor.links` is one rank per node.

Half of the pairs are measured at a time, all at once: two rounds for any even number of nodes.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hpcdl.cluster.launchers.base import Launcher
from hpcdl.cluster.processes import on_every_node
from hpcdl.core.errors import HpcdlError
from hpcdl.core.paths import own_program
from hpcdl.core.units import format_seconds
from hpcdl.doctor.table import Finding, ok, warning

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Communicator

TIMEOUT_S = 60.0
LONG_BYTES = 1 << 20
REPEATS = 5
SLOW = 2.0
"""A link is reported if it takes this many times as long as a good one, of the best quarter."""
_MARK = re.compile(r"<<hpcdl links (\[.*?\])>>")
_REMEDY = "hpcdl bench allreduce there names the slowest pair; leave the node out (sbatch --exclude), tell the staff"


def check_links(launcher: Launcher, num_nodes: int, environment: Mapping[str, str]) -> list[Finding]:
    """Report slow links between neighbours, by a message of 1 MiB over MPI."""
    command, what = own_program("hpcdl.doctor.links", str(num_nodes)), "timing the links"
    try:
        printed = on_every_node(launcher, num_nodes, command, environment, timeout_s=TIMEOUT_S, what=what, mpi=True)
        match = _MARK.search(printed)
        pairs: list[tuple[str, str, float]] = [tuple(pair) for pair in json.loads(match[1])] if match else []
    except HpcdlError as error:
        return [warning(str(error), "hpcdl doctor --only mpi --only scheduler")]
    return judge(pairs) if pairs else [warning(f"{what}: no rank reported any", "hpcdl doctor --only scheduler")]


def judge(pairs: Sequence[tuple[str, str, float]]) -> list[Finding]:
    """Report slow `pairs` (two hosts and the seconds of a message); one host is named if both its links are slow."""
    good = sorted(seconds for _, _, seconds in pairs)[(len(pairs) - 1) // 4]
    slow = [pair for pair in pairs if pair[2] > SLOW * good]
    if not slow:
        longest = max(seconds for _, _, seconds in pairs)
        return [ok(f"{len(pairs)} links: 1 MiB in {format_seconds(good)} to {format_seconds(longest)}")]
    named: set[str] = set()
    findings = []
    for first, second, seconds in sorted(slow, key=lambda pair: -pair[2]):
        both = [host for host in (first, second) if sum(host in pair[:2] for pair in slow) > 1]
        who = f"{both[0]}, over all of its links" if len(both) == 1 else f"{first} - {second}"
        if who not in named:
            named.add(who)
            text = f"{who}: 1 MiB takes {format_seconds(seconds)}, {seconds / good:.1f} times a good link's"
            findings.append(warning(text, _REMEDY))
    return findings


def rounds(num_ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of neighbours in a ring, no rank twice in a round; an odd number of ranks needs a third round."""
    ring = [(rank, (rank + 1) % num_ranks) for rank in range(num_ranks if num_ranks > 2 else 1)]
    last = [ring.pop()] if num_ranks > 2 and num_ranks % 2 else []
    yield from filter(None, (ring[::2], ring[1::2], last))


def measure(communicator: Communicator) -> list[tuple[str, str, float]]:
    """Return the pairs with their hosts and median seconds, on every rank. Collective: every rank must call it."""
    import numpy

    hosts = communicator.allgather_json(communicator.host)
    buffer = numpy.zeros(LONG_BYTES, numpy.uint8)
    own_pairs = []
    for pairs in rounds(communicator.size):
        communicator.barrier()
        for low, high in pairs:
            if communicator.rank in (low, high):
                peer, first = (high, True) if communicator.rank == low else (low, False)
                seconds = _one_way(communicator, peer, buffer, first=first)
                own_pairs += [(hosts[low], hosts[high], seconds)] if first else []
    return [tuple(pair) for of_rank in communicator.allgather_json(own_pairs) for pair in of_rank]


def _one_way(communicator: Communicator, peer: int, buffer: Array, *, first: bool) -> float:
    """Return the median time of half a round trip, in seconds."""
    order = (communicator.isend, communicator.irecv) if first else (communicator.irecv, communicator.isend)
    samples = []
    for _ in range(REPEATS + 1):  # the first opens the connection
        began_s = time.perf_counter()
        for operation in order:
            operation(buffer, peer).wait()
        samples.append((time.perf_counter() - began_s) / 2)
    return statistics.median(samples[1:])


def main() -> int:
    """Run one rank; rank 0 prints all pairs."""
    from hpcdl.comm.mpi.communicator import world

    try:
        communicator = world(int(sys.argv[1]))
        pairs = measure(communicator)
    except HpcdlError as error:
        print(f"hpcdl: {error}", file=sys.stderr)
        return 1
    if communicator.rank == 0:
        print(f"<<hpcdl links {json.dumps(pairs)}>>", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
