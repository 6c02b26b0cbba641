"""What workers and servers do if a rank is lost: leave the broken group, and make a smaller one.

MPI's ULFM (Bland et al. 2013) provides this: an operation that involves a dead rank ends in an error, `revoke`
interrupts all other waits, and `shrink` makes a group of the survivors. Their order is kept, so workers are still the
lowest ranks and servers the highest.

If another rank is lost during this, or it takes longer than MOST_S, this launch ends and new ranks take over.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from hpcdl.comm.observed import Observed
from hpcdl.core.errors import BrokenGroup, RankError
from hpcdl.supervision.watchdog import Watchdog

MOST_S = 10.0
"""Recovery takes about a second; a slow file system, a long step or an overloaded machine may prolong it.

At most 15 s may pass from the loss of a rank to new ranks (GOING_ON_S in cluster/supervise.py).
"""


@contextlib.contextmanager
def in_time(watch: Watchdog) -> Iterator[None]:
    """Inside, a group is repaired. Raises RankError if it breaks again; on a timeout the watchdog ends the rank."""
    host, rank = watch.monitor.host, watch.monitor.rank

    def give_up() -> None:
        text = f"rank {rank} on {host}: those that are left have not found together in {MOST_S:g} s"
        watch.actions.end(RankError(text, rank=rank, host=host, lost=True))

    timer = threading.Timer(MOST_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BrokenGroup as error:
        text = f"another rank was lost while the group was being mended: {error}"
        raise RankError(text, rank=rank, host=host, lost=True) from error
    finally:
        timer.cancel()


def surviving_ranks(
    world: Observed, watch: Watchdog, let_go: Callable[[], None] = lambda: None
) -> tuple[Observed, dict[int, str]]:
    """Return the group of the survivors of `world`, and the hosts of the ranks lost since the last call.

    `let_go` ends this rank's operations in the group, after it is revoked. Every survivor must call. Raises RankError
    if a rank is gone because it ended the job. A launcher may take a while to end the others, and that rank's own error
    must remain the reported one.
    """
    monitor = world.monitor
    # Shrinking waits for every living process, and one that was left behind does not take part.
    if alive := sorted(monitor.lost - world.dead()):
        text = f"rank {alive[0]} was left behind alive: no smaller group can be made without it"
        raise RankError(text, rank=alive[0], lost=True)
    monitor.doing("making a group of the ranks that are left")
    world.revoke()
    let_go()
    survivors = world.survivors()
    lost = frozenset(range(world.size)) - set(survivors.lane.members)
    newly = {rank: watch.hosts.get(rank, "a host unknown yet") for rank in lost - monitor.lost}
    if failed := watch.actions.failed(newly):
        raise RankError(f"rank {failed[0]} on {newly[failed[0]]} has failed", rank=failed[0])
    monitor.lost = lost
    return survivors, newly


def who_was_lost(lost: Mapping[int, str]) -> str:
    """Return the start of a sentence that names the lost ranks by their world rank and host."""
    names = [f"rank {rank} on {host}" for rank, host in sorted(lost.items())]
    return f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} lost"


def surviving_roles(left: Observed, num_workers: int, least: int, lost: Mapping[int, str]) -> tuple[int, int]:
    """Return the numbers of workers and servers in the group `left`, from a world with `num_workers` workers first.

    Raises RankError if there are fewer than `least` workers, or if all servers were lost.
    """
    workers = sum(rank < num_workers for rank in left.lane.members)
    servers = left.size - workers
    who, first = who_was_lost(lost), min(lost, default=None)
    if workers < least:
        raise RankError(f"{who}: {workers} workers are left, --min-workers is {least}", rank=first, lost=True)
    if not servers and any(rank >= num_workers for rank in left.monitor.lost):
        raise RankError(f"{who}: no server is left", rank=first, lost=True)
    return workers, servers
