"""Hybrid all-reduce: shared memory inside a node, rings between nodes (BNL's future work; papers.md's `hierarchical`).

A slice is cut into a share for each of the node's g ranks. Each rank writes its values of the others' shares into its
row of a shared window. It adds the others' values to its own share, and writes the sum to the window's last row. Then a
few ranks of every node, one per lane, run the ring between the m nodes directly on that row, and every rank reads the
sums. All stages overlap for consecutive slices: between two stages the ranks of the node meet in one barrier for all
slices in progress. Nodes may have different numbers of ranks.

Rounds 2(m-1) of messages, none inside a node. A lane's rank sends 2(n/lanes)(m-1)/m bytes, with at most LANES lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from hpcdl.collectives import ring
from hpcdl.collectives.slices import Cost, Workspace, flattened, span, spans, unseen
from hpcdl.comm.arithmetic import plain_add

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished

LANES = 4
"""A few ranks saturate a node's network; more would only make messages short."""
WINDOW_BYTES = 32 << 20
"""Maximum size of a node's shared window."""
SHARE_BYTES = 2 << 20
"""A rank's share of a slice on one node.

For cores that share a cache an eighth of it would be better. Cores without a shared cache would then take three times
as long: recently written data comes from another core's cache instead of memory.
"""


@dataclass(kw_only=True)
class Nodes:
    """This rank's groups: its node, its lane over the nodes, and the window."""

    node: Communicator
    lane: Communicator
    num_nodes: int
    num_lanes: int
    window: Array
    """(slots, ranks of this node and one row for the sums, bytes of a slice)"""
    num_slices: int = 0
    """Slices processed so far, over all calls."""

    def free(self) -> None:
        """Free window and groups."""
        self.node.free()
        self.lane.free()


def allreduce(
    communicator: Communicator,
    buffer: Array,
    workspace: Workspace | None = None,
    add: Add | None = None,
    finished: Finished = unseen,
) -> None:
    """Sum `buffer` over the ranks in place."""
    flat = flattened(buffer)
    if communicator.size == 1 or buffer.size == 0:
        finished(flat)
        return
    memory = workspace or Workspace()
    nodes = memory.keep("nodes", lambda: find_nodes(communicator, memory.message_bytes), Nodes.free)
    length = nodes.window.shape[-1] // flat.itemsize
    slices = [_Slice(nodes, flat[start : start + length]) for start in range(0, flat.size, length)]
    _pipeline(nodes, slices, _stages(nodes, memory, add or plain_add, finished))
    if workspace is None:
        memory.close()


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4, num_nodes: int = 1) -> Cost:
    """Return rounds and bytes of messages between nodes, for nodes with equal numbers of ranks; none inside a node."""
    lanes = min(LANES, num_ranks // num_nodes)
    sizes = {end - start for start, end in spans(num_bytes // item_bytes, lanes)}
    costs = [ring.cost(num_nodes, size * item_bytes, item_bytes) for size in sizes]
    return Cost(rounds=max(each.rounds for each in costs), bytes=max(each.bytes for each in costs))


def find_nodes(communicator: Communicator, message_bytes: int) -> Nodes:
    """Split the ranks by node and by lane, and set up the node's window; every rank calls it."""
    hosts = communicator.allgather_json(communicator.host)
    names = list(dict.fromkeys(hosts))
    local_rank = hosts[: communicator.rank].count(communicator.host)
    num_lanes = min(LANES, *(hosts.count(name) for name in names))
    node = communicator.split(names.index(communicator.host), communicator.rank)
    # A split needs every rank: those without a lane form a group that nothing uses.
    lane = communicator.split(min(local_rank, num_lanes), communicator.rank)
    most_local = max(hosts.count(name) for name in names)
    num_slots = 4 if len(names) > 1 else 3  # as many slices are in progress as there are stages
    if len(names) > 1:
        # A lane cuts its share of a slice into one piece for each node, and each piece is then one full message.
        slice_bytes = message_bytes * num_lanes * len(names)
    else:
        slice_bytes = min(message_bytes, SHARE_BYTES) * most_local
    unit = 64 * num_lanes * len(names)  # whole cache lines and equal pieces for every lane and node
    slice_bytes = max(unit, min(slice_bytes, WINDOW_BYTES // (num_slots * (most_local + 1))) // unit * unit)
    window = node.shared_array((num_slots, node.size + 1, slice_bytes), numpy.uint8)
    return Nodes(node=node, lane=lane, num_nodes=len(names), num_lanes=num_lanes, window=window)


class _Slice:
    """A part of the buffer and its slot in the window: a row for each rank of the node, and one for the sums.

    Slots alternate, also between calls: before a rank reuses a slot it has met all others since they used it.
    """

    def __init__(self, nodes: Nodes, part: Array) -> None:
        self.part = part
        rows = nodes.window[nodes.num_slices % len(nodes.window)].view(part.dtype)[:, : part.size]
        self.rows, self.sums = rows[:-1], rows[-1]
        self.own = slice(*span(part.size, nodes.node.size, nodes.node.rank))
        nodes.num_slices += 1

    @property
    def others(self) -> tuple[slice, slice]:
        """The parts before and after this rank's share."""
        return slice(0, self.own.start), slice(self.own.stop, self.part.size)


_Stage = Callable[[_Slice], None]


def _stages(nodes: Nodes, workspace: Workspace, add: Add, finished: Finished) -> list[_Stage]:
    """Return the stages of a slice, in order; all ranks of the node meet between two stages."""
    own_rank, several = nodes.node.rank, nodes.num_nodes > 1

    def put(piece: _Slice) -> None:
        for part in piece.others:
            piece.rows[own_rank, part] = piece.part[part]

    def add_up(piece: _Slice) -> None:
        own_part = piece.part[piece.own]
        for rank in range(nodes.node.size):
            if rank != own_rank:
                add(own_part, piece.rows[rank, piece.own])  # one rank sums a share for all, so all get the same bits
        piece.sums[piece.own] = own_part

    def cross(piece: _Slice) -> None:
        if own_rank < nodes.num_lanes:
            start, end = span(piece.part.size, nodes.num_lanes, own_rank)
            ring.allreduce(nodes.lane, piece.sums[start:end], workspace, add)

    def take(piece: _Slice) -> None:
        # On one node this rank's own share is already summed in place.
        for part in (slice(None),) if several else piece.others:
            piece.part[part] = piece.sums[part]
        finished(piece.part)

    return [put, add_up, cross, take] if several else [put, add_up, take]


def _pipeline(nodes: Nodes, slices: list[_Slice], stages: list[_Stage]) -> None:
    """Take all slices through all stages, each one stage behind the slice before it."""
    last = len(slices) + len(stages) - 2
    for step in range(last + 1):
        for behind, stage in enumerate(stages):
            if 0 <= step - behind < len(slices):
                stage(slices[step - behind])
        if step < last:  # none after the last stage: slots alternate (`_Slice`)
            nodes.node.barrier()
