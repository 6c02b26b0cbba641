"""What workers and servers alike do where a rank is lost: come out of the broken group, and make a smaller one.

MPI's ULFM (Bland et al. 2013) gives three things: an operation that a dead rank takes part in ends in an error,
`revoke` calls everybody else out of what they wait for, and `shrink` makes a group of those that are left. Their order
stays, so that workers are still the lowest ranks and servers the highest.

A rank that is lost meanwhile, and anything that takes longer than MOST_S, ends this launch: new ranks go on then.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from hpcdl.comm.observed import Observed
from hpcdl.core.errors import BrokenGroup, RankError
from hpcdl.supervision.watchdog import Watchdog

MOST_S = 10.0
"""It takes a second or so; a file system that is slow, a step that is long, and a machine that is full, may make more
of it. From the loss of a rank to new ranks no more than 15 s may pass (GOING_ON_S in cluster/supervise.py)."""


@contextlib.contextmanager
def in_time(watch: Watchdog) -> Iterator[None]:
    """Inside, a group is mended. RankError where it breaks again; where it takes too long, the watch ends the rank."""
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
    """The group of the ranks of `world`, the whole one, that are left, and the hosts of those lost since the last time.

    `let_go` ends what this rank has begun in the group, once that is revoked. Every rank that is left calls. RankError
    where a rank is gone because it ends the job: a launcher may take a while to end those that are left, and what that
    rank said of it must stay.
    """
    seen = world.monitor
    if alive := sorted(seen.lost - world.dead()):
        text = f"rank {alive[0]} was left behind alive: no smaller group can be made without it"
        raise RankError(text, rank=alive[0], lost=True)
    seen.doing("making a group of the ranks that are left")
    world.revoke()
    let_go()
    left = world.survivors()
    lost = frozenset(range(world.size)) - set(left.lane.members)
    newly = {rank: watch.hosts.get(rank, "a host unknown yet") for rank in lost - seen.lost}
    if failed := watch.actions.failed(newly):
        raise RankError(f"rank {failed[0]} on {newly[failed[0]]} has failed", rank=failed[0])
    seen.lost = lost
    return left, newly


def who_was_lost(lost: Mapping[int, str]) -> str:
    """The ranks that were lost, by their numbers in the world and their hosts, as a sentence begins."""
    names = [f"rank {rank} on {host}" for rank, host in sorted(lost.items())]
    return f"{' and '.join(names)} {'was' if len(names) == 1 else 'were'} lost"


def surviving_roles(left: Observed, num_workers: int, least: int, lost: Mapping[int, str]) -> tuple[int, int]:
    """Workers and servers in the group that is `left` of a world whose first `num_workers` ranks were workers.

    RankError where there are fewer than `least` workers, or nobody serves any more where somebody did.
    """
    workers = sum(rank < num_workers for rank in left.lane.members)
    servers = left.size - workers
    who, first = who_was_lost(lost), min(lost, default=None)
    if workers < least:
        raise RankError(f"{who}: {workers} workers are left, --min-workers is {least}", rank=first, lost=True)
    if not servers and any(rank >= num_workers for rank in left.monitor.lost):
        raise RankError(f"{who}: no server is left", rank=first, lost=True)
    return workers, servers
