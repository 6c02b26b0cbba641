"""Copies in the nodes' memory that survive a lost node: parity over groups of nodes, the smallest being a pair.

This is the XOR level of SCR (Moody et al., SC 2010), after RAID 5. In a group of g nodes, the data that a node stores
for a step is cut into g - 1 chunks, one for each other node. Node s stores the exclusive or of the chunks meant for it,
beside its own copies. A lost node is rebuilt from the others' chunks and parities. In a pair the parity is the
partner's copy. Each node sends its data once, and stores an additional 1/(g-1) of the largest node's data.

Only data stored on the node is sent. Synchronous ranks hold the same weights, which rank 0's node stores for all; the
others store only their own data (moving statistics, random states, sums, workers' own weights).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from hpcdl.checkpoint.background import AtOnce
from hpcdl.checkpoint.folders import check_room, digest_of, own_digest, read_arrays, write_arrays
from hpcdl.core.errors import CorruptError, RankError
from hpcdl.core.protocols import Communicator
from hpcdl.core.storage.files import read_json, write_bytes, write_json

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

SCHEMA = "hpcdl.local-parity/1"
NONE, PARTNER, XOR = "none", "partner", "xor"
MOST_NODES = {PARTNER: 2, XOR: 8}
"""Usual group size in nodes, by --local-checkpoint-redundancy; for XOR it is SCR's default."""
_TAG = 17
_SLICE_BYTES = 1 << 20
"""Amount that is read, sent and XORed at a time, between two turns."""
_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 10e-3
"""Waiting for a slice polls with increasing pauses."""

Files = list[tuple[str, int]]
"""Names and sizes of a node's files for one step, in order: chunks are cut from their concatenation."""


class Redundancy(Protocol):
    """What protects copies against the loss of a node."""

    leads: bool
    """Whether this rank is the one of its node that stores parity."""
    needs_all: bool
    """Whether every rank must take part in every copied step, even if it stores no copy of its own."""
    most_patience_s: float
    """The longest time that a copy may wait for gaps, whatever the time until the next copy."""

    def protect(self, folder: Path, names: str, turn: AtOnce) -> None:
        """Protect a step against the loss of a node, after this rank has tried to store it in files like `names`."""


class NoRedundancy:
    """No redundancy: the copies on a lost node are lost."""

    leads = needs_all = False
    most_patience_s = math.inf

    def protect(self, folder: Path, names: str, turn: AtOnce) -> None:
        """Do nothing."""


NO_REDUNDANCY = NoRedundancy()


def groups_of(hosts: Sequence[str], most: int) -> list[list[str]]:
    """Divide hosts into groups of `most` nodes, or a few more if uneven; neighbours in `hosts` get different groups.

    Neighbouring nodes often share a switch or a power supply.
    """
    nodes = [*dict.fromkeys(hosts)]
    num_groups = max(1, len(nodes) // most)
    return [nodes[first::num_groups] for first in range(num_groups)]


def chunk_of(node: int, stripe: int, length: int, num_bytes: int) -> tuple[int, int]:
    """Return begin and end of the chunk for `stripe` (another node's number) in the bytes that `node` stores."""
    number = stripe if stripe < node else stripe - 1
    return min(number * length, num_bytes), min((number + 1) * length, num_bytes)


def read_chunk(folder: Path, files: Files, begin: int, end: int) -> Array:
    """Return bytes `begin` to `end` of the concatenation of all `files`."""
    parts, offset = [], 0
    for name, size in files:
        first, last = max(begin, offset), min(end, offset + size)
        if first < last:
            part = numpy.fromfile(folder / name, numpy.uint8, last - first, offset=first - offset)
            if part.size != last - first:
                raise OSError(f"{folder / name} is shorter than it was")
            parts.append(part)
        offset += size
    return numpy.concatenate(parts) if parts else numpy.zeros(0, numpy.uint8)


def size_of(files: Files) -> int:
    """Return the total size of `files` in bytes."""
    return sum(size for _, size in files)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """One node's parity of a step of its group: `nodes` are the files of each node, `index` is this node's number."""

    index: int
    hosts: list[str]
    nodes: list[Files]
    length: int

    def edges(self, node: int, stripe: int, first: int = 0, last: int | None = None) -> tuple[int, int]:
        """Return the position of bytes `first` to `last` of the chunk of `node` for `stripe`, within all its data."""
        begin, end = chunk_of(node, stripe, self.length, size_of(self.nodes[node]))
        return min(begin + first, end), end if last is None else min(begin + last, end)

    def chunk(self, folder: Path, node: int, stripe: int, first: int = 0, last: int | None = None) -> Array:
        """Return these bytes of `node`, whose files are in `folder`; unreadable bytes become zeros.

        The rebuilt data then fails its digest, and the other ranks do not wait in vain.
        """
        begin, end = self.edges(node, stripe, first, last)
        with contextlib.suppress(OSError):
            return read_chunk(folder, self.nodes[node], begin, end)
        return numpy.zeros(end - begin, numpy.uint8)


class GroupParity:
    """Stores parity of every copy over `communicator`, which has all ranks that store copies; `log` gets failures.

    Other ranks wait for the work that a rank does in gaps; `most_patience_s` limits that wait. Collective.
    """

    needs_all = True

    def __init__(
        self,
        communicator: Communicator,
        redundancy: str,
        log: Callable[[str], None],
        *,
        most_patience_s: float = math.inf,
    ) -> None:
        self._group, self._log, self.most_patience_s = communicator.duplicate(), log, most_patience_s
        self._hosts: list[str] = self._group.allgather_json(self._group.host)
        self._own_group = next(g for g in groups_of(self._hosts, MOST_NODES[redundancy]) if self._group.host in g)
        self.leads = self._group.rank == self._leader(self._group.host)
        self._logged: set[str] = set()

    def protect(self, folder: Path, names: str, turn: AtOnce) -> None:
        """Exchange chunks with the other nodes of the group, through each node's first rank. Collective over all ranks.

        Returns when all nodes have stored what they could: from then on no older step is needed.
        """
        if len(self._own_group) == 1:  # the run has no other node left
            return
        try:
            files_of_ranks = self._gather(turn, _own_files(folder, names, self._group.rank))
            if not all(files_of_ranks):  # an incomplete step is useless
                return
            if self.leads:
                self._keep(folder, names, [self._of_node(host, files_of_ranks) for host in self._own_group], turn)
            self._gather(turn, None)
        except RankError:
            return  # the watch, or the process that started the ranks, reports the lost rank

    def _gather(self, turn: AtOnce, value: Any) -> list[Any]:
        """Return every rank's `value`; a rank that arrives early leaves its core to the steps."""
        turn.pause()
        gathered: list[Any] = self._group.allgather_json(value, patient=True)
        turn()
        return gathered

    def _of_node(self, host: str, kept: Sequence[Files]) -> Files:
        """Return the files that `host` stores; `kept` are the files of each rank."""
        of_ranks = (files for files, host_of_rank in zip(kept, self._hosts, strict=True) if host_of_rank == host)
        return sorted((name, size) for files in of_ranks for name, size in files)

    def _leader(self, host: str) -> int:
        return self._hosts.index(host)

    def _keep(self, folder: Path, names: str, nodes: list[Files], turn: AtOnce) -> None:
        """Exchange the data of `nodes`, and write this node's parity of it; log if there is no room."""
        # The stripes of all nodes need one length, that of the largest; shorter data count as zeros.
        length = -(-max(map(size_of, nodes)) // (len(nodes) - 1))
        index = self._own_group.index(self._group.host)
        parity = Parity(index=index, hosts=self._own_group, nodes=nodes, length=length)
        total = numpy.zeros(length, numpy.uint8)
        for distance in range(1, len(nodes)):  # in each round a node sends to one node and receives from another
            to, source = (index + distance) % len(nodes), (index - distance) % len(nodes)
            for first in range(0, length, _SLICE_BYTES):
                last = min(first + _SLICE_BYTES, length)
                outgoing = parity.chunk(folder, index, to, first, last)
                # The sender computes the same numbers, so no message about sizes is needed.
                begin, end = parity.edges(source, index, first, last)
                incoming = numpy.zeros(end - begin, numpy.uint8)
                self._swap(turn, outgoing, to, incoming, source)
                added = total[first : first + incoming.size]
                numpy.bitwise_xor(added, incoming, out=added)
        try:
            check_room(folder, length)  # only now: without room this node must still send
            write_parity(folder, names, parity, total, ranks=self._group.size, turn=turn)
        except OSError as error:
            self._log_once(f"{self._group.host} keeps no parity in {folder}: {error.strerror or error}")

    def _swap(self, turn: AtOnce, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        """Send to one node of the group and receive from another; empty messages are not sent.

        Polls with pauses: MPI's own wait would keep a core busy and count as a gap, which this thread's wait is not.
        """
        requests = []
        if incoming.size:
            # Posted first: MPI can then receive straight into this buffer.
            requests.append(self._group.irecv(incoming, self._leader(self._own_group[source]), _TAG))
        if outgoing.size:
            requests.append(self._group.isend(outgoing, self._leader(self._own_group[to]), _TAG))
        if not requests:
            return
        turn.pause()
        pause_s = _PAUSE_S
        for request in requests:
            while not request.test():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            request.wait()
        turn()

    def _log_once(self, text: str) -> None:
        """Log a message only once, however many copies cause it."""
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)


def _own_files(folder: Path, names: str, rank: int) -> Files:
    """Return a rank's files for a step; empty if they cannot be read."""
    with contextlib.suppress(OSError):
        return sorted((path.name, path.stat().st_size) for path in folder.glob(names.replace("*", f"rank-{rank}.*")))
    return []


def _paths(folder: Path, names: str) -> tuple[Path, Path]:
    """Return the paths of a step's parity and its document; `names` is the pattern of all files of the step."""
    return folder / names.replace("*", "parity.npz"), folder / names.replace("*", "parity.json")


def write_parity(folder: Path, names: str, parity: Parity, total: Array, *, ranks: int, turn: AtOnce) -> None:
    """Write `total`, and a document about the data that it is made of."""
    data, beside = _paths(folder, names)
    size, content = write_arrays(data, {"parity": total}, turn)
    document = {"schema": SCHEMA, "ranks": ranks, "size": size, "content": content, **vars(parity)}
    write_json(beside, {**document, "digest": own_digest(_as_json(document))})


def _as_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document as reading would return it: tuples become lists."""
    nodes = [[list(entry) for entry in files] for files in document["nodes"]]
    return {**document, "nodes": nodes}


def check_parity(folder: Path, names: str) -> tuple[Parity, int] | None:
    """Return a node's parity of a step and the number of ranks; None if there is none.

    Raises CorruptError if it is damaged.
    """
    data, beside = _paths(folder, names)
    if not beside.exists():
        return None
    try:
        document: dict[str, Any] = read_json(beside)
        sound = document["schema"] == SCHEMA and document["digest"] == own_digest(document)
        if not sound or data.stat().st_size != document["size"] or digest_of(data) != document["content"]:
            raise ValueError("its digest does not fit")
        return from_document(document), int(document["ranks"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the parity {data} in the node's memory is damaged ({error})") from error


def from_document(document: Mapping[str, Any]) -> Parity:
    """Return the parity described by a JSON document."""
    return Parity(
        index=int(document["index"]),
        hosts=[str(host) for host in document["hosts"]],
        # `.name`: no document may lead `write_files` out of its folder.
        nodes=[[(Path(str(name)).name, int(size)) for name, size in files] for files in document["nodes"]],
        length=int(document["length"]),
    )


def contribution(folder: Path, names: str, parity: Parity, stripe: int) -> Array:
    """Return a surviving node's contribution to a stripe of the lost node's chunk; `parity.length` bytes."""
    padded = numpy.zeros(parity.length, numpy.uint8)
    if stripe == parity.index:  # its own parity holds the lost chunk, XORed with the chunks that the others contribute
        return read_arrays(_paths(folder, names)[0])["parity"]
    chunk = parity.chunk(folder, parity.index, stripe)
    padded[: chunk.size] = chunk
    return padded


def write_files(folder: Path, files: Files, content: Array) -> None:
    """Write a lost node's files into `folder`: data before the JSON documents."""
    edges = dict(zip([name for name, _ in files], numpy.cumsum([size for _, size in files]).tolist(), strict=True))
    sizes = dict(files)
    for name in sorted(edges, key=lambda name: name.endswith(".json")):
        write_bytes(folder / name, content[edges[name] - sizes[name] : edges[name]].tobytes())
