"""Copies of shards near their readers: on node-local storage, removed afterwards, or in the process's memory."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import getpass
import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import CorruptError, HpcdlError, RankError, UsageError
from hpcdl.core.paths import typed
from hpcdl.core.processes.streams import caught
from hpcdl.core.protocols import Communicator
from hpcdl.core.storage.disk import Made, make_private_folder, open_new, remove_private
from hpcdl.core.units import format_bytes
from hpcdl.data.format.dataset import Dataset
from hpcdl.data.format.manifest import ShardEntry
from hpcdl.data.format.order import NodeShare
from hpcdl.data.format.shard_file import faults
from hpcdl.data.read.reader import SplitReader

_LOCK = "lock"
_COPY_BYTES = 1 << 24
_RESERVE = 0.02
"""Fraction of the storage that is left free."""


@contextlib.contextmanager
def staged(
    dataset: Dataset,
    base: Path,
    communicator: Communicator | None = None,
    *,
    held_out: range | None = None,
    passed_on: bool = True,
    log: Callable[[str], None] = lambda _: None,
) -> Iterator[Dataset]:
    """Copy the shards that training reads below `base`, one copy per node; yield the data set that reads the copies.

    A node gets the shards that its ranks read: all of the training split if samples are shuffled over the whole data
    set, else its share; and those of the held-out split with `held_out`, the ids that this rank evaluates (None: all).
    With `passed_on`, shards that every node gets are read once and passed on from node to node; `log` gets a summary.
    Copies are checked against their checksums. With a communicator this is collective, and each rank is the worker with
    its number. The folder is private (0700), named by user and job, and removed at the end, at exit and on SIGTERM.
    Folders left by killed jobs of the same user are removed first.
    """
    if dataset.folder is None or dataset.manifest is None:
        yield dataset
        return
    wanted = _wanted(dataset, communicator, held_out)
    path, problem = "", None
    with contextlib.ExitStack() as stack:
        if wanted.leads:
            try:
                folder = stack.enter_context(_private_folder(base))
                path = str(folder)
                _check_space(folder, wanted.own)
            except HpcdlError as error:
                problem = error
        # Before the copying, so that no node copies for hours beside one that has no room.
        _agree(communicator, path, problem)
        with _leaders(communicator if passed_on else None, wanted) as leaders:
            if wanted.leads:
                try:
                    _copy(dataset, Path(path), wanted, leaders)
                except HpcdlError as error:
                    problem = error
            folder_of_node = _agree(communicator, path, problem)
        # From here on every node has all of its copies, each compared with its checksums.
        log(wanted.summary(passed_on=passed_on))
        yield dataclasses.replace(dataset, folder=folder_of_node)
        if communicator is not None:
            communicator.barrier()  # the folder stays until the last rank of the node has read from it


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """Which shards the nodes get: `own` this node, `common` every node; `leads`: this rank is its node's lowest.

    `by_node`: bytes that each node gets; `shared_out`: each node gets only its share of the training split.
    """

    own: tuple[ShardEntry, ...]
    common: tuple[ShardEntry, ...]
    by_node: tuple[int, ...]
    shared_out: bool
    leads: bool

    def summary(self, *, passed_on: bool) -> str:
        """Describe in one line what was copied."""
        low, high, nodes = min(self.by_node), max(self.by_node), len(self.by_node)
        size = format_bytes(high) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
        where = f" on each of {nodes} nodes" if nodes > 1 else ""
        if self.shared_out:
            return f"staged {size}{where}: its share of the training shards, and the held-out shards that it evaluates"
        read = ", read once and passed on" if passed_on and nodes > 1 else ""
        return f"staged {size}{where}: all training shards{read}, and the held-out shards that it evaluates"


def _wanted(dataset: Dataset, communicator: Communicator | None, held_out: range | None) -> _Wanted:
    """Find the shards of every node; collective. Ranks exchange ranges, because lists of many shards would be long."""
    assert dataset.folder is not None
    rank, host = (communicator.rank, communicator.host) if communicator else (0, "")
    train, evaluation = dataset.train_split, dataset.evaluation_split
    share = NodeShare.of(dataset.nodes, rank) if dataset.nodes else None
    needed = [SplitReader(dataset.folder, dataset, train, share).shard_numbers, range(0)]
    shards = list(train.entry.shards) if train.entry else []
    if evaluation and evaluation.entry and evaluation.name != train.name:
        reader = SplitReader(dataset.folder, dataset, evaluation)
        numbers = reader.shard_numbers if held_out is None else reader.shards_of(held_out)
        # Held-out shards are numbered behind the training shards.
        needed[1] = range(len(shards) + numbers.start, len(shards) + numbers.stop) if numbers else range(0)
        shards += evaluation.entry.shards
    request = [host, *((part.start, part.stop) for part in needed)]
    answers: list[Any] = communicator.allgather_json(request) if communicator else [request]
    of_node: dict[str, list[set[range]]] = {}
    for name, *parts in answers:
        for ranges, (start, stop) in zip(of_node.setdefault(name, [set(), set()]), parts, strict=True):
            ranges.add(range(start, stop))
    bytes_before = [0, *itertools.accumulate(shard.num_bytes for shard in shards)]
    by_node = [
        sum(bytes_before[row.stop] - bytes_before[row.start] for ranges in parts for row in _rows(ranges))
        for parts in of_node.values()
    ]
    local = [number for ranges in of_node[host] for row in _rows(ranges) for number in row]
    common = [number for ranges in zip(*of_node.values(), strict=True) for number in _common(ranges)]
    return _Wanted(
        own=tuple(shards[number] for number in local),
        common=tuple(shards[number] for number in common),
        by_node=tuple(by_node),
        shared_out=bool(dataset.nodes),
        leads=next(number for number, (name, *_) in enumerate(answers) if name == host) == rank,
    )


def _rows(ranges: Iterable[range]) -> list[range]:
    """Merge overlapping and adjacent ranges, in order."""
    rows: list[range] = []
    for row in sorted(ranges, key=lambda row: row.start):
        if rows and row.start <= rows[-1].stop:
            rows[-1] = range(rows[-1].start, max(rows[-1].stop, row.stop))
        elif row:
            rows.append(row)
    return rows


def _common(ranges: Sequence[Iterable[range]]) -> range:
    """Return the range that all nodes have in common; empty if a node has several ranges."""
    rows = [_rows(of_node) for of_node in ranges]
    if any(len(of_node) != 1 for of_node in rows):
        return range(0)
    return range(max(row.start for (row,) in rows), min(row.stop for (row,) in rows))


@contextlib.contextmanager
def _leaders(communicator: Communicator | None, wanted: _Wanted) -> Iterator[Communicator | None]:
    """Yield the communicator of the nodes' lowest ranks if there are several nodes; else None. Collective."""
    if communicator is None or len(wanted.by_node) == 1:
        yield None
        return
    # A split is collective: ranks that do not lead form a part that is not used.
    part = communicator.split(0 if wanted.leads else 1)
    yield part if wanted.leads else None
    part.free()  # collective: not called if an error ends the job


def _agree(communicator: Communicator | None, path: str, problem: HpcdlError | None) -> Path:
    """Return the node's folder. A rank with a problem raises it; all others raise a RankError naming that rank."""
    if communicator is None:
        if problem is not None:
            raise problem
        return Path(path)
    message = {
        "host": communicator.host,
        "path": path,
        "problem": str(problem or ""),
        "exit_code": getattr(problem, "exit_code", 0),
    }
    # A rank with a problem takes part first: the others wait in this exchange.
    answers = communicator.allgather_json(message)
    if problem is not None:
        raise problem
    for rank, answer in enumerate(answers):
        if answer["problem"]:
            text = f"rank {rank} on {answer['host']}: {answer['problem']}"
            raise RankError(text, rank=rank, host=answer["host"], exit_code=answer["exit_code"])
    return next(Path(answer["path"]) for answer in answers if answer["host"] == communicator.host and answer["path"])


@contextlib.contextmanager
def _private_folder(base: Path) -> Iterator[Path]:
    """Make a private folder below `base`, locked while this process lives, and remove it afterwards."""
    if base.is_symlink() or not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        raise UsageError(f"cannot stage to {base}: it must be a folder of this node, no link, that you may write to")
    prefix = f"hpcdl-{getpass.getuser()}-"
    # Before the space is checked: what a killed job left may be all that is missing.
    _remove_abandoned(base, prefix)
    # For a person who looks into the folder; the lock, not this name, says whether it is in use.
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or f"pid{os.getpid()}"
    folder, lock = _locked_folder(base, f"{prefix}{job}-")

    remove = folder.remove

    atexit.register(remove)
    try:
        with _exits_on_sigterm():
            yield folder.path
    finally:
        remove()
        atexit.unregister(remove)
        os.close(lock)


def _locked_folder(base: Path, prefix: str) -> tuple[Made, int]:
    """Return a new folder, and the descriptor that locks it."""
    while True:
        folder = make_private_folder(prefix, base)
        with contextlib.suppress(FileNotFoundError):  # another job's clean-up removed the folder before it was locked
            lock = open_new(folder.path / _LOCK, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:  # 0: it was removed between open and lock
                return folder, lock
            os.close(lock)


def _exits_on_sigterm() -> contextlib.AbstractContextManager[None]:
    """Turn SIGTERM and SIGHUP, unless others handle them, into a clean exit, so that the folder is removed too."""

    def leave(number: int) -> None:
        raise SystemExit(128 + number)

    return caught(leave, (signal.SIGTERM, signal.SIGHUP), yields=True)


def _remove_abandoned(base: Path, prefix: str) -> None:
    """Remove this user's folders whose process is gone: real folders, private, with a free lock."""
    for path in base.glob(f"{prefix}*"):
        with contextlib.ExitStack() as held:
            remove_private(path, prefix, lambda folder: _is_abandoned(folder, held))


def _is_abandoned(folder: Path, held: contextlib.ExitStack) -> bool:
    """Lock the folder, held by `held`; return True on success. OSError if it is in use or another job removed it."""
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    held.callback(os.close, lock)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


def _check_space(folder: Path, shards: Sequence[ShardEntry]) -> None:
    needed = sum(shard.num_bytes for shard in shards)
    file_system = os.statvfs(folder)
    free = int(file_system.f_bavail * file_system.f_frsize - _RESERVE * file_system.f_blocks * file_system.f_frsize)
    if needed > free:
        raise HpcdlError(
            f"cannot stage to {folder.parent}: {format_bytes(needed)} are needed, "
            f"{format_bytes(max(0, free))} are free; free some, or train without --stage"
        )


def _copy(dataset: Dataset, folder: Path, wanted: _Wanted, leaders: Communicator | None) -> None:
    """Copy this node's shards into `folder` and check them; `leaders` pass on the shards that all of them need."""
    assert dataset.folder is not None
    passed_on = wanted.common if leaders is not None else ()
    if leaders is not None and not _pass_on(dataset.folder, folder, passed_on, leaders):
        return  # another node's problem is reported on every rank
    copied = {shard.file for shard in passed_on}
    for shard in wanted.own:
        if shard.file not in copied:
            _copy_shard(dataset.folder, folder, shard)
    for shard in wanted.own:
        # Read back from this node's storage, which may fail after the bytes arrived intact.
        wrong = faults(folder, shard)
        if wrong:
            source = dataset.folder
            raise CorruptError(
                f"the copy of {wrong[0]} is damaged; check the original with `{typed('inspect', source, '--verify')}`"
            )


def _copy_shard(source: Path, target: Path, shard: ShardEntry) -> None:
    with _copy_errors(shard, target):
        copy = target / shard.file
        copy.parent.mkdir(exist_ok=True)
        with (source / shard.file).open("rb") as original, copy.open("wb") as out:
            shutil.copyfileobj(original, out, _COPY_BYTES)


@contextlib.contextmanager
def _copy_errors(shard: ShardEntry, target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HpcdlError(f"cannot copy {shard.file} to {target.parent}: {error.strerror}") from error


def _pass_on(source: Path, target: Path, shards: Sequence[ShardEntry], leaders: Communicator) -> bool:
    """Copy `shards` to all nodes: each leader reads its part and broadcasts it in pieces; return whether all succeeded.

    All leaders read at once, and each byte is read once. A leader with a problem continues to the end with the others,
    so that none waits for ever, and then raises it.
    """
    local_pieces = _pieces(source, target, range(leaders.rank, len(shards), leaders.size), shards)
    nothing = (-1, np.empty(0, np.uint8))
    incoming = np.empty(_COPY_BYTES, np.uint8)
    problem: HpcdlError | None = None
    while True:
        try:
            number, piece = next(local_pieces, nothing)
        except HpcdlError as error:
            problem, (number, piece) = error, nothing
        offers = leaders.allgather_json([number, len(piece)])
        if all(offered < 0 for offered, _ in offers):
            break
        for root, (offered, length) in enumerate(offers):
            if offered < 0:
                continue
            # Without a copy: a piece is written before the next one is read into its buffer.
            content = piece if root == leaders.rank else incoming[:length]
            leaders.broadcast(content, root)
            try:
                _append(content, target, shards[offered])
            except HpcdlError as error:
                problem = problem or error
    if problem is not None:
        # The others are in the exchange below, and learn from it that not all succeeded.
        leaders.allgather_json(False)
        raise problem
    return all(leaders.allgather_json(True))


def _pieces(
    source: Path, target: Path, numbers: range, shards: Sequence[ShardEntry]
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    """Yield the bytes of shards `numbers` in pieces; the buffer is reused for the next piece."""
    buffer = np.empty(_COPY_BYTES, np.uint8)
    for number in numbers:
        # Unbuffered: straight into the piece, without a copy.
        with _copy_errors(shards[number], target), (source / shards[number].file).open("rb", 0) as original:
            while count := original.readinto(buffer.data):
                yield number, buffer[:count]


def _append(content: npt.NDArray[np.uint8], target: Path, shard: ShardEntry) -> None:
    with _copy_errors(shard, target):
        copy = target / shard.file
        copy.parent.mkdir(exist_ok=True)
        # Pieces of a shard come in order, from one leader.
        with copy.open("ab") as out:
            out.write(content.data)


OPEN_FILES = Path("/proc/self/fd")
SPARE_FILES = 512
"""Open files that the rest of the process may need."""


def resident(dataset: Dataset, worker: int = 0) -> Dataset:
    """Return `dataset` with its training split read from memory near this process: the data copy of chip partitioning.

    Each shard that `worker` reads is copied to an anonymous file (memfd), whose pages are allocated by the process's
    memory policy. Synthetic data and compressed shards are not copied: HDF5 opens compressed shards by the file's real
    path, which such a copy does not have. The copies live as long as the process, with one open file each. Raises
    HpcdlError if memory or open files run out.
    """
    entry = dataset.train_split.entry
    if dataset.folder is None or entry is None or dataset.manifest is None or dataset.manifest.compression:
        return dataset
    share = NodeShare.of(dataset.nodes, worker) if dataset.nodes else None
    numbers = SplitReader(dataset.folder, dataset, dataset.train_split, share).shard_numbers
    paths = [dataset.folder / entry.shards[number].file for number in numbers]
    _allow_open_files(len(paths) + SPARE_FILES)
    return dataclasses.replace(dataset, copies={path: _copied(path) for path in paths})


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _copied(path: Path) -> Path:
    """Copy `path` into memory; return the path by which this process opens the copy."""
    try:
        # Closed by the end of the process alone: the copy exists as long as this descriptor.
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
    except OSError as error:
        raise _refused(path, error) from error
    try:
        # A duplicate: closing it must not close the memfd, which would free the copy.
        with path.open("rb") as source, os.fdopen(os.dup(descriptor), "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError as error:
        os.close(descriptor)
        raise _refused(path, error) from error
    return OPEN_FILES / str(descriptor)


def _refused(path: Path, error: OSError) -> HpcdlError:
    files = error.errno in (errno.EMFILE, errno.ENFILE)
    remedy = "raise `ulimit -n`, or make larger shards" if files else "use a smaller --groups"
    return HpcdlError(f"cannot hold {path} in memory: {error.strerror}; {remedy}")
