"""Copies of a run's state in its nodes' memory: the level above the file system, for a lost rank.

This is the first level of SCR (Moody et al., SC 2010) and FTI: every few steps each rank copies its own state, and rank
0 also the common state. New ranks on the same nodes resume from the newest step with a whole copy of every rank. The
copies on a lost node are lost, and the newest checkpoint counts, unless `--local-checkpoint-redundancy` allows them to
be rebuilt (parity.py).

`FOLDER/step-S.rank-R.npz` holds the arrays; `step-S.rank-R.json` is written after it with their digest. The folder's
name belongs to the process that starts the ranks: no other or later run takes these copies for its own.

New ranks find the copies to resume from wherever they are: on another node, or in a group's parity.

All ranks learn what every node holds, compute the same plan, and carry it out in the same order. First, a lost node's
copies are rebuilt on a remaining node of its group. Then each copy is sent to the node of the rank that reads it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hpcdl.checkpoint.background import THREAD, BackgroundJob, BackgroundWork, Turn
from hpcdl.checkpoint.folders import Snapshot, check_facts, check_room, digest_of, own_digest, read_arrays, write_arrays
from hpcdl.checkpoint.interval import PATIENCE
from hpcdl.checkpoint.parity import (
    NO_REDUNDANCY,
    Files,
    Parity,
    Redundancy,
    check_parity,
    chunk_of,
    contribution,
    from_document,
    size_of,
    write_files,
)
from hpcdl.cluster.status import FOLDER
from hpcdl.comm.observed import RankMonitor
from hpcdl.core.errors import CorruptError, Interrupted, StoppedEarly, UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.core.storage.disk import make_folder, remove_file, remove_folder, remove_private
from hpcdl.core.storage.files import read_json, write_json, write_text
from hpcdl.core.storage.lock import check_free

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


SCHEMA = "hpcdl.local-checkpoint/1"
LEVEL = "node memory"
KEPT = 2
"""Steps kept of each rank: while one rank writes, another may be a step behind."""
_NOTE = "local-copies"
"""A file in the folder of ranks in the run directory that names the folder of the copies."""
_OWNER = "run"
"""A file with the path of the run directory, which shows whether the folder is still needed."""
_GUARD = (
    "import os, shutil, stat, sys, time\n"
    "for _ in range(1 if sys.stdin.read() else 30):\n"
    "    try:\n"
    "        found = os.lstat(sys.argv[1])\n"
    "        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:\n"
    "            shutil.rmtree(sys.argv[1], ignore_errors=True)\n"
    "    except FileNotFoundError:\n"
    "        pass\n"
    "    time.sleep(0.5)\n"
)
"""The program of the guard, which removes a private folder when the process that started it ends, in whatever way.

Ranks that were not told to end take up to 10 s to do so, and may write until then.
"""


def place(base: Path, run_dir: Path, launched_by: str) -> Path:
    """Return the folder in which the ranks that `launched_by` starts for `run_dir` keep their copies, on every node."""
    word = hashlib.blake2b(f"{run_dir.resolve()} {launched_by}".encode(), digest_size=8).hexdigest()
    return base / f"{_prefix()}{word}"


def _prefix() -> str:
    return f"hpcdl-state-{os.getuid()}-"


@contextlib.contextmanager
def guarded(folder: Path, run_dir: Path) -> Iterator[None]:
    """Guard the copies while ranks are started and restarted; afterwards, even after SIGKILL, this node keeps none.

    A note in `run_dir` tells other programs where the copies are.
    """
    note = run_dir / FOLDER / _NOTE
    make_folder(note.parent)
    write_text(note, str(folder))
    # -P: Python must not import a file in the current folder with the name of a standard module.
    line = [sys.executable, "-P", "-S", "-c", _GUARD, str(folder)]
    # A session of its own: Ctrl-C and signals to the job's process group do not end the guard. Its input ends with this
    # process, also after SIGKILL.
    with subprocess.Popen(line, stdin=subprocess.PIPE, start_new_session=True) as guard:
        assert guard.stdin is not None
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):  # something else has ended the guard
                guard.stdin.write(b"over")
                guard.stdin.close()
            remove_file(note)


def folder_of_copies(run_dir: Path) -> Path | None:
    """Return the folder of an active run's copies on this node; None if there is none."""
    with contextlib.suppress(OSError):
        return Path((run_dir / FOLDER / _NOTE).read_text())
    return None


def newest_copy(run_dir: Path) -> int:
    """Return the step of the newest copy on this node; 0 if there is none."""
    folder = folder_of_copies(run_dir)
    return next(iter(steps_in_folder(folder)), 0) if folder else 0


class LocalCopies:
    """This rank's copies in `folder`, one every `every` steps; 0 makes none.

    If the storage fails or is too small, copying ends with a log message; the run continues.
    """

    def __init__(
        self,
        folder: Path,
        run_dir: Path,
        rank: int,
        every: int,
        log: Callable[[str], None],
        work: BackgroundWork | None = None,
        redundancy: Redundancy = NO_REDUNDANCY,
    ) -> None:
        self.folder, self._rank, self._every, self.log = folder, rank, every, log
        self._work = work or BackgroundWork(THREAD, RankMonitor(rank, rank + 1, ""))
        self._redundancy = redundancy
        self._job: BackgroundJob | None = None
        self._copied = 0
        self._failed = False
        if every:
            self._without(lambda: self._begin(run_dir))

    def due(self, step: int) -> bool:
        """Return whether to make a copy after `step` steps; the same on every rank, even if copying fails on one."""
        return self._every > 0 and step // self._every > self._copied // self._every

    @property
    def is_writing(self) -> bool:
        """Whether a started copy is still in progress."""
        return self._job is not None and self._job.continues

    def start(self, snapshot: Snapshot, step_s: float = 0.0) -> None:
        """Start to write `snapshot`, whose arrays must not change until `wait` has returned.

        If a step takes `step_s`, it may wait for gaps for up to a tenth of the steps until the next copy.
        """
        self._copied = snapshot.step  # also if copying has failed here: `due` must agree on all ranks
        if self._failed and not self._redundancy.needs_all:
            return
        patience_s = min(PATIENCE * self._every * step_s, self._redundancy.most_patience_s)
        self._job = self._work.start("copy", lambda turn: self._copy(snapshot, turn), patience_s)

    def wait(self) -> None:
        """Return when the current copy is stored, or has failed with a warning; it no longer waits for gaps."""
        job, self._job = self._job, None
        if job is not None:
            job.wait()

    def whole(self) -> list[int]:
        """Return the steps of the valid copies, newest first; each damaged copy is logged."""
        valid_steps = []
        for step in steps_in(self.folder, self._rank):
            try:
                check_copy(self.folder, step, self._rank)
                valid_steps.append(step)
            except CorruptError as error:
                self.log(f"{error}; an older state is taken")
        return valid_steps

    def read_shared(self, step: int) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return from rank 0's copy the state common to all ranks, and the facts."""
        return self._read(step, "shared", self._rank), check_copy(self.folder, step, self._rank)["facts"]

    def read_own(self, step: int, rank: int | None = None) -> dict[str, Array]:
        """Return the own arrays of this rank or of `rank`; empty if they are not on this node."""
        rank = self._rank if rank is None else rank
        return self._read(step, "own", rank) if step in steps_in(self.folder, rank) else {}

    def _read(self, step: int, kind: str, rank: int) -> dict[str, Array]:
        arrays = read_arrays(_file(self.folder, step, rank, "npz"))
        return {name.partition(":")[2]: array for name, array in arrays.items() if name.startswith(f"{kind}:")}

    def resume(self, step: int) -> None:
        """Continue the run after `step`: remove later copies, which no longer belong to the run."""
        self._copied = step
        for newer in steps_in(self.folder, self._rank):
            if newer > step:
                self._remove(newer)
        for newer in steps_in_folder(self.folder) if self._redundancy.leads else []:
            if newer > step:
                _remove_all(self.folder, newer)

    @contextlib.contextmanager
    def until_over(self) -> Iterator[None]:
        """Run in this context; if the run ends in order or has been saved, remove all copies of this rank."""
        try:
            yield
        except (StoppedEarly, Interrupted):
            self._clear()
            raise
        self._clear()

    def _begin(self, run_dir: Path) -> None:
        _make(self.folder, run_dir)
        for cut_short in self.folder.glob(".step-*" if self._redundancy.leads else f".*rank-{self._rank}.*"):
            remove_file(cut_short)

    def _clear(self) -> None:
        self.wait()
        if self._every:
            for step in steps_in(self.folder, self._rank):
                self._remove(step)
            for step in steps_in_folder(self.folder) if self._redundancy.leads else []:
                _remove_all(self.folder, step)
            with contextlib.suppress(OSError):  # if others' copies remain, the last rank removes the folder
                remove_folder(self.folder, _OWNER)

    def _without(self, action: Callable[[], None]) -> None:
        """Run `action`; if the storage fails, the run continues without copies."""
        try:
            action()
        except OSError as error:
            self._failed = True
            self.log(f"rank {self._rank} keeps no more copies in {self.folder}: {error.strerror or error}")

    def _copy(self, snapshot: Snapshot, turn: Turn) -> None:
        """Write a copy and protect it: others wait for this rank's part in the redundancy, even if its copy failed."""
        if not self._failed:
            self._without(lambda: self._write(snapshot, turn))
        self._redundancy.protect(self.folder, names_of(snapshot.step), turn)
        if self._redundancy.leads:
            self._without(self._forget_old)

    def _forget_old(self) -> None:
        """Remove the rest of older steps: parity, and the copies of ranks that no longer exist."""
        for old in steps_in_folder(self.folder)[KEPT:]:
            _remove_all(self.folder, old)

    def _write(self, snapshot: Snapshot, turn: Turn) -> None:
        arrays = {f"shared:{name}": array for name, array in snapshot.shared.items()}
        arrays |= {f"own:{name}": array for name, array in snapshot.own.items()}
        missing = KEPT + 1 - len(steps_in(self.folder, self._rank))  # the new copy exists before the oldest is removed
        check_room(self.folder, missing * sum(array.nbytes for array in arrays.values()))
        size, content = write_arrays(self._file(snapshot.step, "npz"), arrays, turn)
        document = {"schema": SCHEMA, "step": snapshot.step, "facts": snapshot.facts, "size": size, "content": content}
        write_json(self._file(snapshot.step, "json"), {**document, "digest": own_digest(document)})
        for old in steps_in(self.folder, self._rank)[KEPT:]:
            self._remove(old)

    def _file(self, step: int, suffix: str) -> Path:
        return _file(self.folder, step, self._rank, suffix)

    def _remove(self, step: int) -> None:
        for suffix in ("json", "npz"):  # a kill in between leaves no document without its data
            remove_file(self._file(step, suffix))


def check_copy(folder: Path, step: int, rank: int) -> dict[str, Any]:
    """Return the JSON document of a copy; CorruptError if it does not match the copy."""
    path = _file(folder, step, rank, "npz")
    try:
        document: dict[str, Any] = read_json(_file(folder, step, rank, "json"))
        sound = document["schema"] == SCHEMA and document["digest"] == own_digest(document)
        sound = sound and document["step"] == step and path.stat().st_size == document["size"]
        if not sound or digest_of(path) != document["content"]:
            raise ValueError("its digest does not fit")
        check_facts(document["facts"])
        if "ranks" not in document["facts"]:
            raise ValueError("its facts have no ranks")
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"the copy {path} in the node's memory is damaged ({error})") from error
    return document


def _file(folder: Path, step: int, rank: int, suffix: str) -> Path:
    return folder / f"{stem(step)}.rank-{rank}.{suffix}"


def stem(step: int) -> str:
    """Return the prefix of the file names of a step."""
    return f"step-{step:010d}"


def names_of(step: int) -> str:
    """Return a pattern for all files of a step."""
    return f"{stem(step)}.*"


def steps_in_folder(folder: Path) -> list[int]:
    """Return the steps of which `folder` holds any file, newest first."""
    names = {path.name.removeprefix("step-").split(".")[0] for path in folder.glob("step-*.json")}
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _remove_all(folder: Path, step: int) -> None:
    for path in sorted(folder.glob(names_of(step)), key=lambda path: path.suffix):  # .json before .npz
        remove_file(path)


def copies_in(folder: Path, step: int) -> list[int]:
    """Return the ranks of which `folder` holds a copy of `step`."""
    names = (path.name.split(".rank-")[1].removesuffix(".json") for path in folder.glob(f"{stem(step)}.rank-*.json"))
    return sorted(int(name) for name in names if name.isdigit())


def steps_in(folder: Path, rank: int = 0) -> list[int]:
    """Return the steps of the copies of `rank` in `folder`, newest first."""
    names = (path.name.removeprefix("step-").split(".")[0] for path in folder.glob(f"step-*.rank-{rank}.json"))
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _make(folder: Path, run_dir: Path) -> None:
    """Make the private folder, after removing folders of this user's runs that have ended."""
    for path in folder.parent.glob(f"{_prefix()}*"):
        if path != folder:
            with contextlib.suppress(OSError, ValueError):
                _remove_abandoned(path)
    folder.mkdir(mode=0o700, exist_ok=True)  # in /dev/shm any user may have made a folder of this name
    if not _is_mine(folder):
        raise PermissionError(f"{folder} is a link, or another user's")
    write_text(folder / _OWNER, str(run_dir.resolve()))


def _is_mine(folder: Path) -> bool:
    state = folder.lstat()
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077


def _remove_abandoned(folder: Path) -> None:
    if not _is_mine(folder):
        return
    with contextlib.suppress(UsageError):  # its run is still active
        check_free(Path((folder / _OWNER).read_text()))
        remove_private(folder, _prefix(), lambda _: True)


def newest_common(answers: Sequence[tuple[Sequence[int], str]], saved: int) -> tuple[int | None, str]:
    """Return the newest step after `saved` of which every rank has a whole copy, or None with a message.

    `answers`: by rank, the steps of its whole copies and its host.
    """
    if not any(max(steps, default=0) > saved for steps, _ in answers):
        return None, ""
    common = max(set.intersection(*(set(steps) for steps, _ in answers)), default=0)
    if common > saved:
        return common, ""
    without = [f"rank {rank} on {host}" for rank, (steps, host) in enumerate(answers) if max(steps, default=0) <= saved]
    who = f"{without[0]} has none that is whole" if without else "no step is whole on every rank"
    return None, f"the copies in the nodes' memory do not do ({who}); going back to the newest checkpoint"


_RECOVERY_TAG = 18


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One node's data of a step, reported by `leader`, its first rank: whole copies, and its group's parity."""

    leader: int
    ranks: list[int]
    num_ranks: int
    parity: Parity | None


@dataclass(kw_only=True)
class Rebuild:
    """A node's copies to rebuild: `lost` is its number in its group, `holders` are the group's remaining nodes."""

    lost: int
    holders: list[Holding]
    ranks: list[int]

    @property
    def at(self) -> int:
        """The rank that rebuilds them."""
        return self.holders[0].leader


@dataclass(kw_only=True)
class RecoveryPlan:
    """How every copy of a step gets onto some node: `where` maps old ranks to the leaders of these nodes."""

    step: int
    where: dict[int, int]
    rebuilds: list[Rebuild] = field(default_factory=list)


def plan_for(step: int, holdings: Sequence[Holding]) -> RecoveryPlan | None:
    """Plan how to get all copies of `step`; None if too many of them are lost."""
    num_ranks = max((holding.num_ranks for holding in holdings), default=0)
    plan = RecoveryPlan(step=step, where={})
    for holding in holdings:
        for rank in holding.ranks:
            plan.where.setdefault(rank, holding.leader)
    missing = set(range(num_ranks)) - set(plan.where)
    while missing:
        # The lowest rank first: all ranks must compute the same plan in the same order.
        rebuild = next(filter(None, (_rebuild_of(rank, holdings) for rank in sorted(missing))), None)
        if rebuild is None:
            return None
        plan.rebuilds.append(rebuild)
        plan.where |= {rank: rebuild.at for rank in rebuild.ranks if rank not in plan.where}
        missing -= set(rebuild.ranks)
    return plan if num_ranks else None


def _rebuild_of(rank: int, holdings: Sequence[Holding]) -> Rebuild | None:
    """Return how to rebuild the node that stored the copy of `rank`, if all others of its group are complete."""
    for holding in holdings:
        if holding.parity is None:
            continue
        lost = next((n for n, files in enumerate(holding.parity.nodes) if rank in _ranks_of(files)), None)
        if lost is None:
            continue
        of_group = {
            member.parity.index: member
            for member in holdings
            if member.parity is not None
            and member.parity.hosts == holding.parity.hosts
            # With a damaged or missing copy on a node, the XOR would rebuild wrong files.
            and _ranks_of(member.parity.nodes[member.parity.index]) <= set(member.ranks)
        }
        needed = [node for node in range(len(holding.parity.nodes)) if node != lost]
        if needed and all(node in of_group for node in needed):
            ranks = sorted(_ranks_of(holding.parity.nodes[lost]))
            return Rebuild(lost=lost, holders=[of_group[node] for node in needed], ranks=ranks)
    return None


def _ranks_of(files: Files) -> set[int]:
    return {int(name.split(".rank-")[1].split(".")[0]) for name, _ in files}


def recover(folder: Path, communicator: Communicator, behind: int, log: Callable[[str], None]) -> None:
    """Bring the newest recoverable step after `behind` to the nodes of the ranks that resume from it; collective.

    Old rank R's copy goes to new rank R; with fewer ranks to R modulo their number.
    """
    hosts: list[str] = communicator.allgather_json(communicator.host)
    leads = hosts.index(communicator.host) == communicator.rank
    own_holdings = [_held(folder, step, communicator.rank) for step in steps_in_folder(folder)] if leads else []
    holdings: dict[int, list[Holding]] = {}
    for answer in communicator.allgather_json([(step, asdict(holding)) for step, holding in own_holdings]):
        for step, document in answer:
            holdings.setdefault(step, []).append(_holding(document))
    plans = (plan_for(step, holdings[step]) for step in sorted(holdings, reverse=True) if step > behind)
    plan = next(filter(None, plans), None)
    if plan is None:
        return
    for rebuild in plan.rebuilds:
        made = _make_again(folder, plan.step, rebuild, communicator, log)
        if not all(communicator.allgather_json(made)):
            return  # without all files of this step the run continues from a checkpoint
        if communicator.rank == 0:
            gone = rebuild.holders[0].parity
            assert gone is not None
            sources = " and ".join(host for number, host in enumerate(gone.hosts) if number != rebuild.lost)
            log(f"what {gone.hosts[rebuild.lost]} held of step {plan.step} is made again from the memory of {sources}")
    for rank, holder in sorted(plan.where.items()):
        # The first rank of its node, as holders are: equal if the copy is already there.
        reader = hosts.index(hosts[rank % communicator.size])
        if reader != holder:
            _hand_over(folder, plan.step, rank, communicator, log, holder=holder, reader=reader)
    communicator.barrier()  # the other ranks of a node read what its first rank received


def _held(folder: Path, step: int, leader: int) -> tuple[int, Holding]:
    ranks, num_ranks, parity = [], 0, None
    for rank in copies_in(folder, step):
        try:
            num_ranks = max(num_ranks, int(check_copy(folder, step, rank)["facts"]["ranks"]))
            ranks.append(rank)
        except CorruptError:
            continue  # as good as lost; the rank that would read it reports it
    try:
        parity_and_ranks = check_parity(folder, names_of(step))
    except CorruptError:
        parity_and_ranks = None
    if parity_and_ranks is not None:
        parity, num_ranks = parity_and_ranks[0], max(num_ranks, parity_and_ranks[1])
    return step, Holding(leader=leader, ranks=ranks, num_ranks=num_ranks, parity=parity)


def _holding(document: dict[str, Any]) -> Holding:
    parity = document["parity"]
    return Holding(**{**document, "parity": None if parity is None else from_document(parity)})


def _make_again(
    folder: Path, step: int, rebuild: Rebuild, communicator: Communicator, log: Callable[[str], None]
) -> bool:  # fmt: skip
    """Rebuild a lost node's files on the first holder, from every holder's part of each stripe.

    Return false on that rank if its storage has no room for them.
    """
    names = names_of(step)
    for holder in rebuild.holders[1:]:
        if communicator.rank == holder.leader:
            assert holder.parity is not None
            for stripe in _stripes(holder.parity, rebuild.lost):
                communicator.isend(contribution(folder, names, holder.parity, stripe), rebuild.at, _RECOVERY_TAG).wait()
    if communicator.rank != rebuild.at:
        return True
    own_parity = rebuild.holders[0].parity
    assert own_parity is not None
    stripes = {stripe: contribution(folder, names, own_parity, stripe) for stripe in _stripes(own_parity, rebuild.lost)}
    for holder in rebuild.holders[1:]:
        for total in stripes.values():  # one tag is enough: MPI keeps the order between two ranks
            incoming = numpy.zeros_like(total)
            communicator.irecv(incoming, holder.leader, _RECOVERY_TAG).wait()
            numpy.bitwise_xor(total, incoming, out=total)
    files = own_parity.nodes[rebuild.lost]
    content = numpy.zeros(size_of(files), numpy.uint8)
    for stripe, chunk in stripes.items():
        begin, end = chunk_of(rebuild.lost, stripe, own_parity.length, content.size)
        content[begin:end] = chunk[: end - begin]
    return _written(folder, files, content, log)


def _written(folder: Path, files: Files, content: Array, log: Callable[[str], None]) -> bool:
    """Write files of lost ranks; log if there is no room for them."""
    try:
        write_files(folder, files, content)
    except OSError as error:
        log(f"{folder} cannot hold the copies of lost ranks ({error.strerror or error}); they are not used")
        return False
    return True


def _stripes(parity: Parity, lost: int) -> Iterable[int]:
    return (stripe for stripe in range(len(parity.nodes)) if stripe != lost)


def _hand_over(
    folder: Path,
    step: int,
    rank: int,
    communicator: Communicator,
    log: Callable[[str], None],
    *,
    holder: int,
    reader: int,
) -> None:
    """Send the copy of old rank `rank` from the node of one rank to that of another."""
    sizes = numpy.zeros(2, numpy.int64)
    paths = [folder / names_of(step).replace("*", f"rank-{rank}.{suffix}") for suffix in ("json", "npz")]
    if communicator.rank == holder:
        content = [numpy.fromfile(path, numpy.uint8) for path in paths]
        sizes[:] = [part.size for part in content]
        communicator.isend(sizes, reader, _RECOVERY_TAG).wait()
        communicator.isend(numpy.concatenate(content), reader, _RECOVERY_TAG).wait()
    elif communicator.rank == reader:
        communicator.irecv(sizes, holder, _RECOVERY_TAG).wait()
        incoming = numpy.zeros(int(sizes.sum()), numpy.uint8)
        communicator.irecv(incoming, holder, _RECOVERY_TAG).wait()
        files = [(path.name, int(size)) for path, size in zip(paths, sizes, strict=True)]
        _written(folder, files, incoming, log)  # else `LocalCopies.whole` lacks it, and a checkpoint serves
