"""The two contracts that rooms meet at: how ranks talk, and how ranks start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]
    Add = Callable[[Array, Array], None]
    """`add(target, incoming)` sums `incoming` into `target`, element by element, in place."""
    Finished = Callable[[Array], None]
    """`finished(part)` is told of a flat part of a buffer that has come to its last value, while it is in the cache."""


class Request(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when the buffer may be used again (send) or is filled (receive)."""

    def test(self) -> bool:
        """Whether `wait` would return, or fail, at once; True too where only waiting tells. Helps the message along."""


class RemoteArray(Protocol):
    """An array on each rank of a group, which the others read and add to while its own rank does something else."""

    @property
    def own(self) -> Array:
        """This rank's array, as it lies in memory; to look at it helps no message along."""

    def read(self, owner: int, target: Array) -> None:
        """Fill `target` with the start of rank `owner`'s array; returns when it is there."""

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add `values` to rank `owner`'s array from `start` on; returns when they are there.

        Each element is added whole; elements of two ranks that add at once may mix.
        """

    def free(self) -> None:
        """Give the memory back; collective."""


class Communicator(Protocol):
    """How the ranks of one group talk. Buffers are C-contiguous numpy arrays; lengths agree on both sides.

    Every collective must be called by all ranks in the same order. A failed peer raises RankError or ends the job;
    it never hangs a caller that the implementation can wake.
    """

    @property
    def rank(self) -> int:
        """This rank's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def host(self) -> str:
        """Name of the node that this rank runs on; ranks with equal names share memory."""

    @property
    def library(self) -> str:
        """What carries the messages, with its version: `MPICH 5.0.2`, `threads`."""

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> Request:
        """Start sending `buffer`; it must stay untouched until the request is waited for."""

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> Request:
        """Start receiving into `buffer`, in order of sending for each source and tag."""

    def wait_any(self, requests: Sequence[Request], look: Callable[[], None] = lambda: None) -> int:
        """Wait until one of `requests` is done and return its index; first come, first served.

        `look` is called now and then while nothing comes; what it raises ends the wait.
        """

    def barrier(self) -> None:
        """Return when every rank has called."""

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` on every rank with the root's bytes, in place."""

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Sum `buffer` over the ranks in place, by the library's own algorithm; `add` replaces the plain sum."""

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Every rank's `value` (anything JSON can hold), in rank order, on every rank.

        `patient`, on every rank alike: others may take long, and whoever waits leaves its core to other threads.
        """

    def duplicate(self) -> Communicator:
        """The same group with a message space of its own, for use by another thread."""

    def split(self, color: int, key: int = 0) -> Communicator:
        """The group of the ranks that gave the same `color`, ordered by `key`, then rank."""

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """One zeroed array that every rank of this group sees; all ranks must be on one node.

        It lives as long as the communicator; `barrier` separates writing from reading.
        """

    def remote_array(self, length: int, dtype: Any) -> RemoteArray:
        """A zeroed array of `length` elements on each rank (0 for none on this one); RankError where MPI has none."""

    def failed(self) -> set[int]:
        """Ranks of this group that are known to be dead; empty where the library cannot tell, or ends the job then."""

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Communicator:
        """The group of the ranks that are alive and not in `lost`, in the same order; every one of them has to call."""

    def free(self) -> None:
        """Give back what `duplicate` or `split` took, and shared arrays; called by every rank, last."""

    def abort(self, exit_code: int) -> None:
        """End every rank of the job now."""


@runtime_checkable
class Revocable(Protocol):
    """A Communicator whose ranks can be called out of whatever they wait for in it, by ULFM."""

    def revoke(self) -> None:
        """Every operation in this group, and in all that were made of it, ends in BrokenGroup, on every rank.

        Now or whenever it comes; `survivors` alone still goes.
        """


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How ranks are to be started: computed by node/, carried out by cluster/.

    `environment` is set before Python starts. `cpus_by_local_rank[i]` is the affinity of the i-th rank of a node
    (empty: the scheduler's), `memory_nodes_by_local_rank[i]` its NUMA nodes (empty: the default policy).
    `goes_on`: the ranks go on without one that dies, so the launcher must not end them.
    """

    num_ranks: int
    ranks_per_node: int
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus_by_local_rank: Sequence[Sequence[int]] = ()
    memory_nodes_by_local_rank: Sequence[Sequence[int]] = ()
    memory_policy: str = "default"
    continues: bool = False
