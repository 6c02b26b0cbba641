"""Copies of shards near who reads them: on storage of the node, removed afterwards, or in the process's memory."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import getpass
import os
import resource
import shutil
import signal
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.core.signals import caught
from hpcdl.core.units import format_bytes
from hpcdl.data.dataset import Dataset
from hpcdl.data.format.manifest import ShardEntry
from hpcdl.data.format.shard_file import faults

_LOCK = "lock"
_COPY_BYTES = 1 << 24
_RESERVE = 0.02
"""Part of the storage that is left free."""


@contextlib.contextmanager
def staged(
    dataset: Dataset, base: Path, communicator: Communicator | None = None, told: Callable[[int], None] = lambda _: None
) -> Iterator[Dataset]:
    """Copy the shards that training reads below `base`, one copy a node; yield the data set that reads the copies.

    The order of samples mixes all shards, so every node gets all of them. Copies are checked against their checksums.
    With a communicator every rank must call. The folder is private (0700), named by user and job, and removed at the
    end, at exit and at SIGTERM; what a killed job of the same user left behind is removed first.
    """
    if dataset.folder is None or dataset.manifest is None:
        yield dataset
        return
    leader, path, problem = _leads(communicator), "", None
    with contextlib.ExitStack() as stack:
        if leader:
            try:
                folder = stack.enter_context(_private_folder(base))
                _copy(dataset, folder, told)
                path = str(folder)
            except HpcdlError as error:
                problem = error
        folder_of_node = _agree(communicator, path, problem)
        yield dataclasses.replace(dataset, folder=folder_of_node)
        if communicator is not None:
            communicator.barrier()


def _leads(communicator: Communicator | None) -> bool:
    """Whether this rank is the lowest of its node."""
    if communicator is None:
        return True
    hosts = communicator.allgather_json(communicator.host)
    return bool(hosts.index(communicator.host) == communicator.rank)


def _agree(communicator: Communicator | None, path: str, problem: HpcdlError | None) -> Path:
    """The node's folder; every rank raises where one rank had a problem."""
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
    answers = communicator.allgather_json(message)
    for answer in answers:
        if answer["problem"]:
            error = HpcdlError(f"{answer['host']}: {answer['problem']}")
            error.exit_code = answer["exit_code"]
            raise error
    return next(Path(answer["path"]) for answer in answers if answer["host"] == communicator.host and answer["path"])


@contextlib.contextmanager
def _private_folder(base: Path) -> Iterator[Path]:
    """A new folder below `base` that nobody else can enter, locked while this process lives, removed afterwards."""
    if base.is_symlink() or not base.is_dir() or not os.access(base, os.W_OK | os.X_OK):
        raise UsageError(f"cannot stage to {base}: it must be a folder of this node, no link, that you may write to")
    prefix = f"hpcdl-{getpass.getuser()}-"
    _remove_abandoned(base, prefix)
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("PBS_JOBID") or f"pid{os.getpid()}"
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{job}-", dir=base))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def remove() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    try:
        with _exits_on_sigterm():
            yield folder
    finally:
        remove()
        atexit.unregister(remove)
        os.close(lock)


def _exits_on_sigterm() -> contextlib.AbstractContextManager[None]:
    """Turn SIGTERM and SIGHUP into a clean exit, where nobody else handles them, so that the folder goes too."""

    def leave(number: int) -> None:
        raise SystemExit(128 + number)

    return caught(leave, (signal.SIGTERM, signal.SIGHUP), yields=True)


def _remove_abandoned(base: Path, prefix: str) -> None:
    """Remove folders of this user whose process is gone: real folders, private, their lock free."""
    for path in base.glob(f"{prefix}*"):
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            continue
        with contextlib.suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _copy(dataset: Dataset, folder: Path, told: Callable[[int], None]) -> None:
    assert dataset.folder is not None
    wanted = [dataset.train_split, dataset.evaluation_split]
    shards = [shard for split in wanted if split and split.entry for shard in split.entry.shards]
    needed = sum(shard.num_bytes for shard in shards)
    found = os.statvfs(folder)
    free = int(found.f_bavail * found.f_frsize - _RESERVE * found.f_blocks * found.f_frsize)
    if needed > free:
        raise HpcdlError(
            f"cannot stage to {folder.parent}: {format_bytes(needed)} are needed, "
            f"{format_bytes(max(0, free))} are free; free some, or train without --stage"
        )
    for shard in shards:
        _copy_shard(dataset.folder, folder, shard)
        told(shard.num_bytes)


def _copy_shard(source: Path, target: Path, shard: ShardEntry) -> None:
    copy = target / shard.file
    copy.parent.mkdir(exist_ok=True)
    try:
        with (source / shard.file).open("rb") as original, copy.open("wb") as out:
            shutil.copyfileobj(original, out, _COPY_BYTES)
    except OSError as error:
        raise HpcdlError(f"cannot copy {shard.file} to {target.parent}: {error.strerror}") from error
    wrong = faults(target, shard)
    if wrong:
        raise CorruptError(
            f"the copy of {wrong[0]} is damaged; check the original with `hpcdl inspect {source} --verify`"
        )


OPEN_FILES = Path("/proc/self/fd")
SPARE_FILES = 512
"""Open files that the rest of the process may want."""


def resident(dataset: Dataset) -> Dataset:
    """`dataset` with its training split read from memory near this process: chip partitioning's copy of the data.

    Each shard is copied to an anonymous file (memfd), whose pages come from where the process's memory policy says.
    Data made from a seed and compressed shards stay as they are: HDF5 reads those by the file's real path, which such a
    copy has not got. The copies live as long as the process, one open file each. HpcdlError where memory or open files
    run out.
    """
    entry = dataset.train_split.entry
    if dataset.folder is None or entry is None or dataset.manifest is None or dataset.manifest.compression:
        return dataset
    paths = [dataset.folder / shard.file for shard in entry.shards]
    _allow_open_files(len(paths) + SPARE_FILES)
    return dataclasses.replace(dataset, copies={path: _copied(path) for path in paths})


def _allow_open_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _copied(path: Path) -> Path:
    """Where this process finds a copy of `path` in memory."""
    try:
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
    except OSError as error:
        raise _refused(path, error) from error
    try:
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
