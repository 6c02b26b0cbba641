"""Copies in the nodes' memory that outlive a node: parity over groups of nodes, of which a pair is the smallest.

As the XOR level of SCR (Moody et al., SC 2010), after RAID 5: what a node of a group of g keeps of a step is cut into
g - 1 chunks, one for each of the others; node s keeps the exclusive or of the chunks that are meant for it, beside its
own copies. A node that is lost is made again from the others' chunks and parities. In a pair it is the partner's copy.
Each node sends what it keeps once, and keeps 1/(g-1) of the largest node's more.

Only what lies on a node is sent: ranks that step together hold the same weights, which rank 0's node keeps for all; of
the others it is what is their own (moving statistics, random states, sums, workers' own weights).
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
"""Nodes of a group, by --local-checkpoint-redundancy; SCR's default for XOR."""
_TAG = 17
_SLICE_BYTES = 1 << 20
"""As much is read, sent and added up in one go, between two turns."""
_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 10e-3
"""Who waits for a slice looks for it with pauses that grow."""

Files = list[tuple[str, int]]
"""Names and sizes of what a node keeps of one step, in order: its chunks are cut from all of it in a row."""


class Redundancy(Protocol):
    """What is done about copies beyond keeping them."""

    leads: bool
    """Whether this rank is the one of its node that keeps parity."""
    needs_all: bool
    """Whether every rank has to take part at every step that is copied, though it keep no copy of its own."""
    most_patience_s: float
    """How long a copy may wait for gaps, whatever time there is until the next one."""

    def protect(self, folder: Path, names: str, turn: AtOnce) -> None:
        """This rank has tried to keep its copy of a step, in files like `names`: see to it that a node may be lost."""


class NoRedundancy:
    """What a lost node held is lost."""

    leads = needs_all = False
    most_patience_s = math.inf

    def protect(self, folder: Path, names: str, turn: AtOnce) -> None:
        """Nothing."""


NO_REDUNDANCY = NoRedundancy()


def groups_of(hosts: Sequence[str], most: int) -> list[list[str]]:
    """Groups of `most` nodes, or a few more where they do not come out even; neighbours in `hosts` are kept apart.

    Nodes that stand side by side often share a switch or a power supply.
    """
    nodes = [*dict.fromkeys(hosts)]
    num_groups = max(1, len(nodes) // most)
    return [nodes[first::num_groups] for first in range(num_groups)]


def chunk_of(node: int, stripe: int, length: int, num_bytes: int) -> tuple[int, int]:
    """Where, in the bytes that `node` keeps, its chunk for `stripe` (another node's number) begins and ends."""
    place = stripe if stripe < node else stripe - 1
    return min(place * length, num_bytes), min((place + 1) * length, num_bytes)


def read_chunk(folder: Path, files: Files, begin: int, end: int) -> Array:
    """Bytes `begin` to `end` of all `files` in a row."""
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
    """Bytes of all of them."""
    return sum(size for _, size in files)


@dataclass(frozen=True, kw_only=True)
class Parity:
    """What one node keeps of a step of its group: `nodes` are the files of each, `index` is its own number there."""

    index: int
    hosts: list[str]
    nodes: list[Files]
    length: int

    def edges(self, node: int, stripe: int, first: int = 0, last: int | None = None) -> tuple[int, int]:
        """Bytes `first` to `last` of the chunk of `node` for `stripe`: where they lie in all that it keeps."""
        begin, end = chunk_of(node, stripe, self.length, size_of(self.nodes[node]))
        return min(begin + first, end), end if last is None else min(begin + last, end)

    def chunk(self, folder: Path, node: int, stripe: int, first: int = 0, last: int | None = None) -> Array:
        """These bytes, of `node`, whose files lie in `folder`; what cannot be read is left empty.

        Then what is made of it fails its digest, and others do not wait in vain.
        """
        begin, end = self.edges(node, stripe, first, last)
        with contextlib.suppress(OSError):
            return read_chunk(folder, self.nodes[node], begin, end)
        return numpy.zeros(end - begin, numpy.uint8)


class GroupParity:
    """Keeps parity of every copy over `communicator`, that of all ranks that keep copies; `log` gets what fails.

    Others wait for what a rank does in gaps: `most_patience_s` is how long it may take for that. Collective.
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
        """Exchange chunks with the other nodes of the group, by each node's first rank. Collective over all ranks.

        Returns when all nodes have kept what they could: no older step is needed from then on.
        """
        if len(self._own_group) == 1:  # the run has no other node any more
            return
        try:
            kept = self._gather(turn, _own_files(folder, names, self._group.rank))
            if not all(kept):  # a step that is not whole is of no use to anybody
                return
            if self.leads:
                self._keep(folder, names, [self._of_node(host, kept) for host in self._own_group], turn)
            self._gather(turn, None)
        except RankError:
            return  # whoever is lost is told of by the watch, or by who started the ranks

    def _gather(self, turn: AtOnce, value: Any) -> list[Any]:
        """Every rank's `value`; who is there first leaves its core to the steps meanwhile."""
        turn.pause()
        gathered: list[Any] = self._group.allgather_json(value, patient=True)
        turn()
        return gathered

    def _of_node(self, host: str, kept: Sequence[Files]) -> Files:
        """What `host` keeps, where `kept` is what each rank does."""
        of_ranks = (files for files, theirs in zip(kept, self._hosts, strict=True) if theirs == host)
        return sorted((name, size) for files in of_ranks for name, size in files)

    def _leader(self, host: str) -> int:
        return self._hosts.index(host)

    def _keep(self, folder: Path, names: str, nodes: list[Files], turn: AtOnce) -> None:
        """Exchange what `nodes` keep, and write this node's parity of it; say so where there is no room for it."""
        length = -(-max(map(size_of, nodes)) // (len(nodes) - 1))
        index = self._own_group.index(self._group.host)
        parity = Parity(index=index, hosts=self._own_group, nodes=nodes, length=length)
        total = numpy.zeros(length, numpy.uint8)
        for distance in range(1, len(nodes)):  # each sends to one and gets from another one, in turn
            to, source = (index + distance) % len(nodes), (index - distance) % len(nodes)
            for first in range(0, length, _SLICE_BYTES):
                last = min(first + _SLICE_BYTES, length)
                outgoing = parity.chunk(folder, index, to, first, last)
                begin, end = parity.edges(source, index, first, last)
                incoming = numpy.zeros(end - begin, numpy.uint8)
                self._swap(turn, outgoing, to, incoming, source)
                added = total[first : first + incoming.size]
                numpy.bitwise_xor(added, incoming, out=added)
        try:
            check_room(folder, length)
            write_parity(folder, names, parity, total, ranks=self._group.size, turn=turn)
        except OSError as error:
            self._log_once(f"{self._group.host} keeps no parity in {folder}: {error.strerror or error}")

    def _swap(self, turn: AtOnce, outgoing: Array, to: int, incoming: Array, source: int) -> None:
        """Send to one node of the group and get from another; nothing goes either way where there is nothing to send.

        Looked for with pauses: MPI's own wait would keep a core busy, and would be a gap, which this thread's is not.
        """
        requests = []
        if incoming.size:
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
        """Say it once, however many copies come to it."""
        if text not in self._logged:
            self._logged.add(text)
            self._log(text)


def _own_files(folder: Path, names: str, rank: int) -> Files:
    """What a rank keeps of a step; nothing where that cannot be read."""
    with contextlib.suppress(OSError):
        return sorted((path.name, path.stat().st_size) for path in folder.glob(names.replace("*", f"rank-{rank}.*")))
    return []


def _paths(folder: Path, names: str) -> tuple[Path, Path]:
    """The parity of a step, and what is written beside it; `names` ends in a star for everything of that step."""
    return folder / names.replace("*", "parity.npz"), folder / names.replace("*", "parity.json")


def write_parity(folder: Path, names: str, parity: Parity, total: Array, *, ranks: int, turn: AtOnce) -> None:
    """Keep `total`, and what it is made of."""
    data, beside = _paths(folder, names)
    size, content = write_arrays(data, {"parity": total}, turn)
    document = {"schema": SCHEMA, "ranks": ranks, "size": size, "content": content, **vars(parity)}
    write_json(beside, {**document, "digest": own_digest(_as_json(document))})


def _as_json(document: Mapping[str, Any]) -> dict[str, Any]:
    """As reading gives it back: tuples are lists."""
    nodes = [[list(entry) for entry in files] for files in document["nodes"]]
    return {**document, "nodes": nodes}


def check_parity(folder: Path, names: str) -> tuple[Parity, int] | None:
    """The parity that a node keeps of a step, and the number of ranks; None where there is none.

    CorruptError where it is damaged.
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
    """Parity as JSON has it."""
    return Parity(
        index=int(document["index"]),
        hosts=[str(host) for host in document["hosts"]],
        nodes=[[(Path(str(name)).name, int(size)) for name, size in files] for files in document["nodes"]],
        length=int(document["length"]),
    )


def contribution(folder: Path, names: str, parity: Parity, stripe: int) -> Array:
    """What a node that is left gives of a stripe, so that the lost node's chunk comes out; `parity.length` bytes."""
    padded = numpy.zeros(parity.length, numpy.uint8)
    if stripe == parity.index:
        return read_arrays(_paths(folder, names)[0])["parity"]
    chunk = parity.chunk(folder, parity.index, stripe)
    padded[: chunk.size] = chunk
    return padded


def write_files(folder: Path, files: Files, content: Array) -> None:
    """Put what a lost node kept into `folder`: data before what is written beside it."""
    edges = dict(zip([name for name, _ in files], numpy.cumsum([size for _, size in files]).tolist(), strict=True))
    sizes = dict(files)
    for name in sorted(edges, key=lambda name: name.endswith(".json")):
        write_bytes(folder / name, content[edges[name] - sizes[name] : edges[name]].tobytes())
