"""A copy of a training split in this process's own memory, near its cores: chip partitioning's copy of the data.

Each shard is copied to an anonymous file in memory (memfd), whose pages come from where the process's memory policy
says. Nothing is left behind when the process ends, however it ends. Compressed shards stay where they are: HDF5 reads
them by the file's real path, which such a copy has not got.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import resource
import shutil
from pathlib import Path

from hpcdl.core.errors import HpcdlError
from hpcdl.data.dataset import Dataset

OPEN_FILES = Path("/proc/self/fd")
SPARE_FILES = 512
"""Open files that the rest of the process may want."""


def resident(dataset: Dataset) -> Dataset:
    """`dataset` with its training split read from memory; unchanged where it is compressed or made from a seed.

    The copies live as long as the process, one open file each. HpcdlError where memory or open files run out.
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
