"""New ranks find the copies that they go on from, wherever they are: on another node, or in a group's parity.

All ranks hear what every node holds, come to the same plan, and carry it out in the same order: first what a lost node
held is made again on one that is left of its group, then each copy goes to the node of the rank that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from hpcdl.checkpoint.memory import check_copy, copies_in, names_of, steps_in_folder
from hpcdl.checkpoint.parity import (
    Files,
    Parity,
    check_parity,
    chunk_of,
    contribution,
    from_document,
    size_of,
    write_files,
)
from hpcdl.core.errors import CorruptError
from hpcdl.core.protocols import Communicator

_TAG = 18


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What one node holds of a step, told by `leader`, its first rank: whole copies, and its group's parity."""

    leader: int
    ranks: list[int]
    num_ranks: int
    parity: Parity | None


@dataclass(kw_only=True)
class Rebuild:
    """A node's copies that are to be made again: number `lost` of the group whose nodes that are left `holders` are."""

    lost: int
    holders: list[Holding]
    ranks: list[int]

    @property
    def at(self) -> int:
        """The rank that makes them."""
        return self.holders[0].leader


@dataclass(kw_only=True)
class RecoveryPlan:
    """How every copy of a step comes to lie on some node: `where` gives the leader of it by old rank."""

    step: int
    where: dict[int, int]
    rebuilds: list[Rebuild] = field(default_factory=list)


def plan_for(step: int, holdings: Sequence[Holding]) -> RecoveryPlan | None:
    """How the copies of `step` are all to be had; None where too much of it is lost."""
    num_ranks = max((holding.num_ranks for holding in holdings), default=0)
    plan = RecoveryPlan(step=step, where={})
    for holding in holdings:
        for rank in holding.ranks:
            plan.where.setdefault(rank, holding.leader)
    missing = set(range(num_ranks)) - set(plan.where)
    while missing:
        rebuild = next(filter(None, (_rebuild_of(rank, holdings) for rank in sorted(missing))), None)
        if rebuild is None:
            return None
        plan.rebuilds.append(rebuild)
        plan.where |= {rank: rebuild.at for rank in rebuild.ranks if rank not in plan.where}
        missing -= set(rebuild.ranks)
    return plan if num_ranks else None


def _rebuild_of(rank: int, holdings: Sequence[Holding]) -> Rebuild | None:
    """How the node that kept the copy of `rank` is made again, where all others of its group are whole."""
    for holding in holdings:
        if holding.parity is None:
            continue
        lost = next((n for n, files in enumerate(holding.parity.nodes) if rank in _ranks_of(files)), None)
        if lost is None:
            continue
        of_group = {
            other.parity.index: other
            for other in holdings
            if other.parity is not None
            and other.parity.hosts == holding.parity.hosts
            and _ranks_of(other.parity.nodes[other.parity.index]) <= set(other.ranks)
        }
        needed = [node for node in range(len(holding.parity.nodes)) if node != lost]
        if needed and all(node in of_group for node in needed):
            ranks = sorted(_ranks_of(holding.parity.nodes[lost]))
            return Rebuild(lost=lost, holders=[of_group[node] for node in needed], ranks=ranks)
    return None


def _ranks_of(files: Files) -> set[int]:
    return {int(name.split(".rank-")[1].split(".")[0]) for name, _ in files}


def recover(folder: Path, communicator: Communicator, behind: int, log: Callable[[str], None]) -> None:
    """Bring the newest step behind `behind` that can be had to the nodes of the ranks that go on from it; collective.

    Old rank R's copy goes to new rank R, with fewer ranks to R modulo their number.
    """
    hosts: list[str] = communicator.allgather_json(communicator.host)
    leads = hosts.index(communicator.host) == communicator.rank
    mine = [_held(folder, step, communicator.rank) for step in steps_in_folder(folder)] if leads else []
    held: dict[int, list[Holding]] = {}
    for answer in communicator.allgather_json([(step, asdict(holding)) for step, holding in mine]):
        for step, document in answer:
            held.setdefault(step, []).append(_holding(document))
    plans = (plan_for(step, held[step]) for step in sorted(held, reverse=True) if step > behind)
    plan = next(filter(None, plans), None)
    if plan is None:
        return
    for rebuild in plan.rebuilds:
        _make_again(folder, plan.step, rebuild, communicator)
        if communicator.rank == 0:
            gone = rebuild.holders[0].parity
            assert gone is not None
            left = " and ".join(host for number, host in enumerate(gone.hosts) if number != rebuild.lost)
            log(f"what {gone.hosts[rebuild.lost]} held of step {plan.step} is made again from the memory of {left}")
    for rank, holder in sorted(plan.where.items()):
        reader = hosts.index(hosts[rank % communicator.size])
        if reader != holder:
            _hand_over(folder, plan.step, rank, communicator, holder=holder, reader=reader)
    communicator.barrier()  # other ranks of a node read what its first one has got


def _held(folder: Path, step: int, leader: int) -> tuple[int, Holding]:
    ranks, num_ranks, parity = [], 0, None
    for rank in copies_in(folder, step):
        try:
            num_ranks = max(num_ranks, int(check_copy(folder, step, rank)["facts"]["ranks"]))
            ranks.append(rank)
        except CorruptError:
            continue  # as good as lost; the rank that would read it tells
    try:
        found = check_parity(folder, names_of(step))
    except CorruptError:
        found = None
    if found is not None:
        parity, num_ranks = found[0], max(num_ranks, found[1])
    return step, Holding(leader=leader, ranks=ranks, num_ranks=num_ranks, parity=parity)


def _holding(document: dict[str, Any]) -> Holding:
    parity = document["parity"]
    return Holding(**{**document, "parity": None if parity is None else from_document(parity)})


def _make_again(folder: Path, step: int, rebuild: Rebuild, communicator: Communicator) -> None:
    """Every holder gives its part of each stripe; the first of them puts the lost node's files together."""
    names = names_of(step)
    for holder in rebuild.holders[1:]:
        if communicator.rank == holder.leader:
            assert holder.parity is not None
            for stripe in _stripes(holder.parity, rebuild.lost):
                communicator.isend(contribution(folder, names, holder.parity, stripe), rebuild.at, _TAG).wait()
    if communicator.rank != rebuild.at:
        return
    own = rebuild.holders[0].parity
    assert own is not None
    stripes = {stripe: contribution(folder, names, own, stripe) for stripe in _stripes(own, rebuild.lost)}
    for holder in rebuild.holders[1:]:
        for total in stripes.values():
            incoming = numpy.zeros_like(total)
            communicator.irecv(incoming, holder.leader, _TAG).wait()
            numpy.bitwise_xor(total, incoming, out=total)
    files = own.nodes[rebuild.lost]
    content = numpy.zeros(size_of(files), numpy.uint8)
    for stripe, chunk in stripes.items():
        begin, end = chunk_of(rebuild.lost, stripe, own.length, content.size)
        content[begin:end] = chunk[: end - begin]
    write_files(folder, files, content)


def _stripes(parity: Parity, lost: int) -> Iterable[int]:
    return (stripe for stripe in range(len(parity.nodes)) if stripe != lost)


def _hand_over(
    folder: Path, step: int, rank: int, communicator: Communicator, *, holder: int, reader: int
) -> None:  # fmt: skip
    """The copy of old rank `rank` goes from the node of one rank to that of another."""
    sizes = numpy.zeros(2, numpy.int64)
    paths = [folder / names_of(step).replace("*", f"rank-{rank}.{suffix}") for suffix in ("json", "npz")]
    if communicator.rank == holder:
        content = [numpy.fromfile(path, numpy.uint8) for path in paths]
        sizes[:] = [part.size for part in content]
        communicator.isend(sizes, reader, _TAG).wait()
        communicator.isend(numpy.concatenate(content), reader, _TAG).wait()
    elif communicator.rank == reader:
        communicator.irecv(sizes, holder, _TAG).wait()
        incoming = numpy.zeros(int(sizes.sum()), numpy.uint8)
        communicator.irecv(incoming, holder, _TAG).wait()
        write_files(folder, [(path.name, int(size)) for path, size in zip(paths, sizes, strict=True)], incoming)
