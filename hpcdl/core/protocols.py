"""The two contracts that packages share: how ranks communicate, and how ranks start."""

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
    """`finished(part)` receives a flat part of a buffer that has its final value, while it is still in the cache."""


class Request(Protocol):
    """A pending message."""

    def wait(self) -> None:
        """Return when the buffer may be reused (send) or is filled (receive)."""

    def test(self) -> bool:
        """Return True if `wait` would return or fail at once, or if only waiting can tell. Advances the message."""


class RemoteArray(Protocol):
    """An array on each rank of a group, which other ranks read and add to while its own rank does other work."""

    @property
    def own(self) -> Array:
        """This rank's array in memory; reading it advances no message."""

    def read(self, owner: int, target: Array) -> None:
        """Fill `target` with the start of rank `owner`'s array; return when the data have arrived."""

    def add(self, owner: int, values: Array, start: int = 0) -> None:
        """Add `values` to rank `owner`'s array from `start` on; return when they have arrived.

        Each element is added atomically; if two ranks add at once, their elements may interleave.
        """

    def free(self) -> None:
        """Free the memory. Collective: every rank must call it."""


class Communicator(Protocol):
    """Communication of the ranks of one group. Buffers are C-contiguous numpy arrays; lengths agree on both sides.

    Every collective must be called by all ranks in the same order. A failed peer raises RankError or ends the job;
    a caller that the implementation can wake never hangs.
    """

    @property
    def rank(self) -> int:
        """This rank's number, 0 to size - 1."""

    @property
    def size(self) -> int:
        """Number of ranks in the group."""

    @property
    def host(self) -> str:
        """The name of this rank's node; ranks with equal names share memory."""

    @property
    def library(self) -> str:
        """The library that carries the messages, with its version: `MPICH 5.0.2`, `threads`."""

    def isend(self, buffer: Array, destination: int, tag: int = 0) -> Request:
        """Start sending `buffer`, which must stay unchanged until the request has been waited for."""

    def irecv(self, buffer: Array, source: int, tag: int = 0) -> Request:
        """Start receiving into `buffer`; messages arrive in sending order for each source and tag."""

    def wait_any(self, requests: Sequence[Request], look: Callable[[], None] = lambda: None) -> int:
        """Wait until one of `requests` is done and return its index; first come, first served.

        `look` is called now and then while nothing arrives; an error that it raises ends the wait.
        """

    def barrier(self) -> None:
        """Return when every rank has called it."""

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Fill `buffer` on every rank with the root's bytes, in place."""

    def allreduce(self, buffer: Array, add: Add | None = None) -> None:
        """Sum `buffer` over the ranks in place, by the library's own algorithm; `add` replaces the plain sum."""

    def allgather_json(self, value: Any, *, patient: bool = False) -> list[Any]:
        """Return every rank's `value` (any JSON value), in rank order, on every rank.

        `patient`, the same on every rank: others may take long, and a waiting rank leaves its core to other threads.
        """

    def duplicate(self) -> Communicator:
        """Return the same group with a separate message space, for use by another thread."""

    def split(self, color: int, key: int = 0) -> Communicator:
        """Return the group of the ranks that passed the same `color`, ordered by `key`, then rank."""

    def shared_array(self, shape: Sequence[int], dtype: Any) -> Array:
        """Return one zeroed array that every rank of this group shares; all ranks must be on one node.

        It lives as long as the communicator; `barrier` separates writing from reading.
        """

    def remote_array(self, length: int, dtype: Any) -> RemoteArray:
        """Return an array of `length` zeros (0: none here) on each rank. Raises RankError without MPI support."""

    def failed(self) -> set[int]:
        """Return the ranks known to be dead; empty if the library cannot tell, or ends the job in that case."""

    def survivors(self, lost: AbstractSet[int] = frozenset()) -> Communicator:
        """Return the group of the live ranks that are not in `lost`, in the same order. Collective over those ranks."""

    def free(self) -> None:
        """Free what `duplicate` or `split` allocated, and shared arrays. Every rank calls it last."""

    def abort(self, exit_code: int) -> None:
        """End every rank of the job immediately."""


@runtime_checkable
class Revocable(Protocol):
    """A Communicator whose ranks can be released from any operation that they wait for, by ULFM."""

    def revoke(self) -> None:
        """End every operation in this group, and in all groups made from it, with BrokenGroup on every rank.

        This holds for current and later operations; only `survivors` still works.
        """


@dataclass(frozen=True, kw_only=True)
class LaunchPlan:
    """How ranks are started: computed by node/, carried out by cluster/.

    `environment` is set before Python starts. `cpus_by_local_rank[i]` is the affinity of the i-th rank of a node
    (empty: the scheduler's), `memory_nodes_by_local_rank[i]` its NUMA nodes (empty: the default policy).
    `continues`: the other ranks continue if one dies, so the launcher must not end them.
    """

    num_ranks: int
    ranks_per_node: int
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus_by_local_rank: Sequence[Sequence[int]] = ()
    memory_nodes_by_local_rank: Sequence[Sequence[int]] = ()
    memory_policy: str = "default"
    continues: bool = False
