"""A copy of a training split in this process's own memory, near its cores: chip partitioning's copy of the data.

Each shard is copied to an anonymous file in memory (memfd), whose pages come from where the process's memory policy
says. Nothing is left behind when the process ends, however it ends. Compressed shards are read from their files.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

from hpcdl.core.errors import HpcdlError
from hpcdl.data.dataset import Dataset

OPEN_FILES = Path("/proc/self/fd")


def resident(dataset: Dataset) -> Dataset:
    """`dataset` with its training split read from memory; unchanged where samples are made from a seed.

    The copies live as long as the process. HpcdlError where memory or file descriptors run out.
    """
    entry = dataset.train_split.entry
    if dataset.folder is None or entry is None:
        return dataset
    paths = [dataset.folder / shard.file for shard in entry.shards]
    return dataclasses.replace(dataset, copies={path: _copied(path) for path in paths})


def _copied(path: Path) -> Path:
    """Where this process finds a copy of `path` in memory."""
    try:
        descriptor = os.memfd_create(path.name, os.MFD_CLOEXEC)
        with path.open("rb") as source, os.fdopen(os.dup(descriptor), "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except OSError as error:
        raise HpcdlError(f"cannot hold {path} in memory: {error.strerror}; use a smaller --groups") from error
    return OPEN_FILES / str(descriptor)
