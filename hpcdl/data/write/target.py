"""The folder that shards are written to: checks before writing, preparation, and clean-up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.storage.disk import Made, make_folder, remove_folder, sweep
from hpcdl.core.storage.lock import FILE_NAME as LOCK_NAME
from hpcdl.core.storage.lock import check_free
from hpcdl.core.units import counted, format_bytes
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import FILE_NAME as MANIFEST_NAME
from hpcdl.data.format.manifest import Manifest
from hpcdl.data.sources.reader.source import user_reader
from hpcdl.data.write.journal import partial_manifests
from hpcdl.data.write.lustre import set_stripes
from hpcdl.data.write.plan import REPAIRED, WORK_NAME, ShardJob, shard_file
from hpcdl.data.write.request import ShardRequest

_FEW_FILES = 16
_OURS = {WORK_NAME, LOCK_NAME}
_WORK_HOLDS = (
    rf"names|\.?job\.json(\..+\.tmp)?|(rows|images|members)\..+|(gathered|array|copy)\d+(\..+)?|\d+\.npy|.+\.(pixels|plain)"
    rf"|{REPAIRED}(/.+)?"
)
"""Everything that sources, the plan and a repair write into the work folder, as a pattern of paths below it."""


def check_target(request: ShardRequest) -> None:
    """Raise UsageError unless the target is new, empty, or may be resumed as requested, and has no other writer."""
    target = request.target
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file; name a folder to write to")
    if not target.is_dir():
        return
    # First: what another writer is making looks unfinished, and must not be advised to be removed.
    check_free(target)
    names = {entry.name for entry in target.iterdir()} - _OURS
    partial = bool(partial_manifests(target))
    if MANIFEST_NAME in names and not request.resume:
        raise UsageError(f"{target} holds a finished data set; name another folder")
    if partial and not request.resume:
        raise UsageError(f"{target} holds an unfinished data set; continue with --resume, or remove it")
    if names and not partial and MANIFEST_NAME not in names:
        raise UsageError(f"{target} is not empty and no data folder; name a new or an empty folder")


def check_reader(folder: Path, manifest: Manifest, reader: str) -> None:
    """Raise UsageError unless this reader, with its present content, made the data in `folder`."""
    made_by = manifest.source.get("reader_sha256", "")
    if made_by == (user_reader(reader).digest if reader else ""):
        return
    if made_by and not reader:
        raise UsageError(
            f"{folder} was made by the reader {manifest.source.get('reader', '')} (SHA-256 {made_by[:16]}...); "
            "if you trust its code, give --reader FILE.py:NAME"
        )
    was = f"the reader {manifest.source.get('reader', '')} as it was then" if made_by else "no reader"
    raise UsageError(f"{folder} was made by {was}, and {reader} is not the same; give that one, or another folder")


def make_folders(target: Path) -> list[Made]:
    """Make `target` and its parents; return the folders that are new, deepest first."""
    try:
        new_folders = make_folder(target)
    except OSError as error:
        raise UsageError(f"cannot make the folder {target}: {error.strerror}; name another one") from error
    if not os.access(target, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {target}: permission denied; name another folder")
    return new_folders


def new_work_folder(target: Path) -> Path:
    """Make an empty work folder in `target`, on which the caller holds the lock."""
    if foreign := remove_work_folder(target):
        raise UsageError(f"{target / WORK_NAME} holds {foreign[0]}, which hpcdl has not left there; move it away")
    (target / WORK_NAME).mkdir(mode=0o700)
    return target / WORK_NAME


def remove_work_folder(target: Path) -> list[str]:
    """Remove the work folder of this call or a killed writer; if it holds foreign files, return them and keep all."""
    return remove_folder(target / WORK_NAME, _WORK_HOLDS)


@contextmanager
def undoing(target: Path, made: list[Made]) -> Iterator[Callable[[], None]]:
    """Remove the empty folders `made` after an error; once the yielded function is called, keep them."""
    undo = True

    def keep() -> None:
        nonlocal undo
        undo = False

    try:
        yield keep
    except BaseException:
        # Where whole shards are entered, the folder is what --resume continues.
        if undo and not partial_manifests(target):
            for folder in made:
                folder.remove(if_empty=True)
        raise


def prepare_splits(target: Path, job: ShardJob) -> None:
    """Make the folders of the splits, set their stripes, and remove temporary files of a killed writer."""
    for split in job.plan.shards:
        folder = (target / shard_file(split, 0, UNSPLIT)).parent
        make_folder(folder)
        if job.plan.stripes:
            # Lustre fixes the layout of a file when it is created.
            set_stripes(folder, job.plan.stripes)
        sweep(folder, r"shard-\d+\.h5")
    sweep(target, r"manifest\.json")


def missing_bytes(job: ShardJob, num_shards: int) -> int:
    """Estimate the number of bytes that `num_shards` shards take."""
    return int(job.plan.total_bytes / len(job.tasks()) * num_shards) + num_shards * job.plan.alignment


def check_space(target: Path, job: ShardJob, num_shards: int) -> None:
    """Raise HpcdlError if `num_shards` shards cannot fit; not for compressed data, whose size is unknown."""
    needed = missing_bytes(job, num_shards)
    file_system = os.statvfs(target)
    if job.compression is None and file_system.f_bavail * file_system.f_frsize < needed:
        raise no_space(target, needed)


def no_space(target: Path, needed: int, *, at_most: bool = False, quota: bool = False) -> HpcdlError:
    """Return the error for a full file system, or a `quota` that is used up; `at_most`: compressed data takes less."""
    file_system = os.statvfs(target)
    free = f"{format_bytes(file_system.f_bavail * file_system.f_frsize)} are free"
    # Zero files in all means no limit: some file systems make inodes as needed.
    if file_system.f_files and file_system.f_favail < _FEW_FILES:
        free += f", but only {counted(file_system.f_favail, 'file')} (`df -i`)"
    wanted = f"at most {format_bytes(needed)}" if at_most else format_bytes(needed)
    return HpcdlError(
        f"no space left in {target}: {wanted} are needed, {'and your quota is used up' if quota else free}; "
        "make room and run the same command with --resume"
    )
