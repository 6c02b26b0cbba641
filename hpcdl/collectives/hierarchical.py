"""Hybrid all-reduce: shared memory inside a node, rings between nodes (BNL's future work; papers.md's `hierarchical`).

Each rank copies a slice into its row of a shared window. Each of the node's g ranks sums its g-th of all rows, in rank
order. Then a few ranks of every node, one for each lane, ring the lanes between the m nodes, straight from the window,
and every rank copies the result out. Nodes may hold different numbers of ranks.

Rounds 2(m-1) of messages, none inside a node. A lane's rank sends 2(n/lanes)(m-1)/m bytes, with at most LANES lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.collectives import ring
from hpcdl.collectives.slices import flattened, spans
from hpcdl.collectives.workspace import Cost, Workspace, unseen
from hpcdl.comm.sums import plain_add

if TYPE_CHECKING:
    from hpcdl.core.protocols import Add, Array, Communicator, Finished

LANES = 4
"""A few ranks saturate a node's network; more would only make messages short."""
WINDOW_BYTES = 32 << 20
"""The most that the shared window of a node takes."""
_SLOTS = 2


@dataclass(kw_only=True)
class Nodes:
    """Where this rank stands: its node's group, its lane's group over the nodes, and the window."""

    node: Communicator
    lane: Communicator
    num_nodes: int
    num_lanes: int
    window: Array
    """(slots, ranks of this node, bytes of a slice)"""
    slot: int = 0

    def next_rows(self, num_elements: int, dtype: Any) -> Array:
        """The rows (ranks of this node, elements) of the next slice.

        Slots alternate, also from call to call: a rank that writes a slot again has met all others at the barriers of
        the slice in between, after they had read the slot's last result.
        """
        self.slot = (self.slot + 1) % _SLOTS
        rows: Array = self.window[self.slot].view(dtype)[:, :num_elements]
        return rows

    def free(self) -> None:
        """Give back window and groups."""
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
    kept = workspace or Workspace()
    nodes = kept.keep("nodes", lambda: find_nodes(communicator, kept.message_bytes), Nodes.free)
    length = nodes.window.shape[-1] // flat.itemsize
    for start in range(0, flat.size, length):
        part = flat[start : start + length]
        _exchange(nodes, part, nodes.next_rows(part.size, flat.dtype), kept, add or plain_add)
        finished(part)
    if workspace is None:
        kept.close()


def cost(num_ranks: int, num_bytes: int, item_bytes: int = 4, num_nodes: int = 1) -> Cost:
    """Rounds and bytes of messages between nodes, for nodes with equal numbers of ranks; none inside a node."""
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
    lane = communicator.split(min(local_rank, num_lanes), communicator.rank)
    most_local = max(hosts.count(name) for name in names)
    slice_bytes = message_bytes * (num_lanes * len(names) if len(names) > 1 else 1)
    unit = 64 * num_lanes * len(names)  # whole cache lines and equal pieces for every lane and node
    slice_bytes = max(unit, min(slice_bytes, WINDOW_BYTES // (_SLOTS * most_local)) // unit * unit)
    window = node.shared_array((_SLOTS, node.size, slice_bytes), numpy.uint8)
    return Nodes(node=node, lane=lane, num_nodes=len(names), num_lanes=num_lanes, window=window)


def _exchange(nodes: Nodes, part: Array, rows: Array, workspace: Workspace, add: Add) -> None:
    node = nodes.node
    rows[node.rank] = part
    node.barrier()
    start, end = spans(part.size, node.size)[node.rank]
    for row in range(1, node.size):
        add(rows[0, start:end], rows[row, start:end])
    node.barrier()
    if nodes.num_nodes > 1:
        if node.rank < nodes.num_lanes:
            start, end = spans(part.size, nodes.num_lanes)[node.rank]
            ring.allreduce(nodes.lane, rows[0, start:end], workspace, add)
        node.barrier()
    part[...] = rows[0]
