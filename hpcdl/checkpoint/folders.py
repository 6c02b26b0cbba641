"""Checkpoints: folders that are complete or absent, verified when read, written while training continues.

`checkpoints/step-0000001200/` holds `shared.npz` (state common to all ranks, by rank 0), `rank-R.npz` (a rank's own
state) and `checkpoint.json`. The last is written at the end and lists every file with its size and BLAKE2b digest. The
folder has a temporary name until then. See docs/reference/checkpoints.md.

The classes of facts define what a resumed run needs in a checkpoint.json, and with which types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy

from hpcdl.checkpoint.background import THREAD, AtOnce, BackgroundJob, BackgroundWork, Turn
from hpcdl.comm.observed import observe
from hpcdl.core.errors import CorruptError, RankError, UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.from_json import from_json
from hpcdl.core.records.run_record import HistoryPoint
from hpcdl.core.storage.archives import check_stored
from hpcdl.core.storage.disk import (
    creating,
    free_name,
    make_folder,
    move,
    remove_file,
    remove_folder,
    sweep,
    temporary_name,
    touch,
)
from hpcdl.core.storage.files import read_json, write_json
from hpcdl.core.units import format_bytes

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


_MOST = 2**53


@dataclass(frozen=True, kw_only=True)
class TrainFacts:
    """Facts of `hpcdl train`; those with a default are missing in checkpoints of earlier versions."""

    ranks: int
    global_batch: int
    steps_per_epoch: int
    seconds: float
    history: Sequence[HistoryPoint]
    shift: int = 0
    buckets: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AsynchronousFacts(TrainFacts):
    """Facts of `hpcdl train` with a strategy whose workers proceed by the center's count of updates."""

    count: int
    evaluated_count: int = -1


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Facts of a script's hpcdl.State."""

    ranks: int
    values: Mapping[str, Any]
    rates: Sequence[Sequence[float] | None] = ()
    moves: Sequence[Sequence[int] | None] = ()


Facts = TrainFacts | ScriptFacts
_AT_LEAST = {"ranks": 1, "global_batch": 1, "steps_per_epoch": 1, "evaluated_count": -1, "shift": -_MOST}
"""Minimum of numbers whose minimum is not 0."""
_STAND_IN = {
    "ranks": 1, "global_batch": 1, "steps_per_epoch": 1, "seconds": 0.0, "history": [], "count": 0, "values": {},
}  # fmt: skip


def check_facts(facts: Any, kind: type[Facts] | None = None) -> None:
    """Raise TypeError or ValueError for facts that a run of this `kind` lacks, or for impossible values.

    If `kind` is None, only the facts present are checked.
    """
    if not isinstance(facts, dict):
        raise TypeError("its facts are no object")
    missing = [item.name for item in dataclasses.fields(kind or TrainFacts) if _is_needed(item, facts)]
    if kind is not None and missing:
        raise ValueError(f"its facts have no {', '.join(missing)}")
    checked = from_json(kind, facts) if kind else from_json(_kind_of(facts), {**_STAND_IN, **facts})
    for name, value in vars(checked).items():
        if isinstance(value, int | float) and not _AT_LEAST.get(name, 0) <= value <= _MOST:
            raise ValueError(f"{name} is {value!r}")


def kind_for(*, synchronous: bool) -> type[TrainFacts]:
    """Return the facts that a run of `hpcdl train` needs, by its strategy."""
    return TrainFacts if synchronous else AsynchronousFacts


def _kind_of(facts: Mapping[str, Any]) -> type[Facts]:
    if "values" in facts:
        return ScriptFacts
    return AsynchronousFacts if {"count", "evaluated_count"} & facts.keys() else TrainFacts


def _is_needed(item: dataclasses.Field[Any], facts: Mapping[str, Any]) -> bool:
    has_default = item.default is not dataclasses.MISSING or item.default_factory is not dataclasses.MISSING
    return not has_default and item.name not in facts


SCHEMA = "hpcdl.checkpoint/1"
FOLDER = "checkpoints"
SHARED_FILE = "shared.npz"
MANIFEST = "checkpoint.json"
_SLICE_BYTES = 256 << 10
"""Amount written and hashed at a time: less than half a millisecond of work."""
HOLDS = r"(shared|rank-\d+)\.npz|checkpoint\.json|\..+\.tmp"
"""Pattern of the files in a checkpoint's folder."""
SAVED = ".hpcdl-saved"
"""File beside the checkpoints folder with the newest step, so that a missing folder is noticed."""
_STEP = r"step-\d{10}"
_RESERVE = 0.1
"""Fraction of the storage that is left free."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state after `step` steps. `shared` is used only on rank 0, `own` on every rank; `facts` is JSON."""

    step: int
    shared: Mapping[str, Array] = field(default_factory=dict)
    own: Mapping[str, Array] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class CheckpointWriter:
    """Writes snapshots in the background with `work`, one at a time; collective over `communicator`.

    A disk failure causes a warning and never ends the run: the last good checkpoint remains. `before` is called with
    the step before anything is written, and may raise OSError.
    """

    def __init__(
        self,
        run_dir: Path,
        communicator: Communicator,
        keep: int,
        before: Callable[[int], None] = lambda step: None,
        work: BackgroundWork | None = None,
    ) -> None:
        self._folder = run_dir / FOLDER
        self._communicator = communicator.duplicate()
        self._keep, self._before = keep, before
        self._work = work or BackgroundWork(THREAD, observe(communicator).monitor)
        self._job: BackgroundJob | None = None
        self.warnings: list[str] = []
        self.newest: int | None = None
        """Step of the newest durable checkpoint, known to every rank."""

    @property
    def is_writing(self) -> bool:
        """Whether a started write is still in progress."""
        return self._job is not None and self._job.continues

    def start(self, snapshot: Snapshot, patience_s: float = 0.0) -> None:
        """Start to write `snapshot`, whose arrays must not change any more; first waits for the previous write.

        It may wait for gaps for `patience_s`.
        """
        self.wait()
        self._job = self._work.start("checkpoint", lambda turn: self._write(snapshot, turn), patience_s)

    def wait(self) -> None:
        """Return when the current write is durable, or has failed with a warning; it no longer waits for gaps."""
        job, self._job = self._job, None
        if job is not None:
            job.wait()

    def abandon(self) -> None:
        """Return when no write is in progress, finished or not, because the group is revoked."""
        with contextlib.suppress(RankError):
            self.wait()

    def _gather(self, turn: Turn, value: Any) -> list[Any]:
        """Return every rank's `value`; a rank that finishes early leaves its core to the steps."""
        turn.pause()
        gathered = self._communicator.allgather_json(value, patient=True)
        turn()
        return gathered

    def _write(self, snapshot: Snapshot, turn: Turn) -> None:
        begun = self._begin(snapshot.step) if self._communicator.rank == 0 else ("", "")
        name, problem = self._gather(turn, begun)[0]
        temporary, files = self._folder / name, dict[str, Any]()
        try:
            if not problem:
                files = self._write_arrays(temporary, snapshot, turn)
        except OSError as error:
            # Not raised: the other ranks wait for this one in the next gather.
            problem = f"{error.strerror or error} (rank {self._communicator.rank} on {self._communicator.host})"
        gathered = self._gather(turn, [problem, files])
        problem = next((text for text, _ in gathered if text), "")
        over = False
        if self._communicator.rank == 0:
            over = self._finish(snapshot, temporary, problem, {k: v for _, part in gathered for k, v in part.items()})
        if self._gather(turn, over)[0]:
            self.newest = snapshot.step

    def _write_arrays(self, folder: Path, snapshot: Snapshot, turn: Turn) -> dict[str, Any]:
        """Write this rank's files; return their sizes and digests by name."""
        self._before(snapshot.step)
        files = {}
        if self._communicator.rank == 0:
            files[SHARED_FILE] = write_arrays(folder / SHARED_FILE, snapshot.shared, turn)
        own_name = own_file(self._communicator.rank)
        files[own_name] = write_arrays(folder / own_name, snapshot.own, turn)
        return files

    def _begin(self, step: int) -> tuple[str, str]:
        """Make the folder on rank 0 under an unpredictable name; return that name, and a problem if there is one."""
        name = temporary_name(f"step-{step:010d}")
        try:
            if self._folder.parent.is_dir():  # a run directory that has been removed is not made again
                make_folder(self._folder)
            (self._folder / name).mkdir()
        except OSError as error:
            return "", f"{error.strerror or error} (rank 0 on {self._communicator.host})"
        return name, ""

    def _finish(self, snapshot: Snapshot, temporary: Path, problem: str, files: Mapping[str, Any]) -> bool:
        """Rename the checkpoint to its final name; return False, with a warning, if this or an earlier part failed."""
        try:
            if problem:
                raise OSError(problem)
            document = {"schema": SCHEMA, "step": snapshot.step, "facts": snapshot.facts, "files": files}
            write_json(temporary / MANIFEST, {**document, "digest": own_digest(document)})
            remove(self._folder, snapshot.step)  # a damaged one, which resuming skipped, may have the name
            move(temporary, folder_of(self._folder, snapshot.step))
            # After the rename: a note about a checkpoint that failed would make a later --resume refuse.
            touch(self._folder.with_name(SAVED), f"{snapshot.step}\n".encode())
            self._remove_old(snapshot.step)  # last: until the rename an old checkpoint may be the only valid one
        except OSError as error:
            if temporary.name != FOLDER:  # the temporary folder exists
                remove_folder(temporary, HOLDS)
            self.warnings.append(
                f"no checkpoint at step {snapshot.step}: {error.strerror or error}; the one before stays"
            )
            return False
        return True

    def _remove_old(self, newest: int) -> None:
        """Remove checkpoints beyond `keep`, and those of later steps, which are older: more ranks take fewer steps."""
        steps = list_checkpoints(self._folder)
        later = [step for step in steps if step > newest]
        for old in (*later, *steps[len(later) + self._keep :]):
            remove(self._folder, old)


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint made by the run; if it contains any other file, keep all of it."""
    remove_folder(folder_of(folder, step), HOLDS)


def sweep_unfinished(run_dir: Path) -> list[str]:
    """Remove unfinished checkpoints of killed ranks; the caller holds the lock on the run directory."""
    swept = sweep(run_dir / FOLDER, _STEP)
    # Earlier versions named the folder by its step alone.
    for path in sorted((run_dir / FOLDER).glob(".step-*.tmp")):
        if re.fullmatch(rf"\.{_STEP}\.tmp", path.name) and not remove_folder(path, HOLDS):
            swept.append(path.name)
    return swept


def what_is_missing(run_dir: Path) -> str:
    """Say what happened to checkpoints saved in `run_dir` that are missing; empty if none are."""
    folder, saved = run_dir / FOLDER, ""
    if folder.is_symlink() and not folder.exists():
        return f"{folder} is a link to {folder.readlink()}, which is not there"
    with contextlib.suppress(OSError):
        saved = (run_dir / SAVED).read_text(encoding="ascii", errors="replace").strip()
    if not saved or list_checkpoints(folder):
        return ""
    return f"{run_dir} has saved up to step {saved}, and {folder} {'is empty' if folder.exists() else 'is gone'}"


def set_aside(run_dir: Path) -> Path | None:
    """Rename the checkpoints of a run that is to start again; return the new path, None if there are none."""
    folder = run_dir / FOLDER
    remove_file(run_dir / SAVED)
    if not folder.is_symlink() and not folder.exists():
        return None
    aside = free_name(folder)
    move(folder, aside)
    return aside


def newest_valid(run_dir: Path, warnings: list[str], kind: type[Facts] | None = None) -> int | None:
    """Return the step of the newest valid checkpoint; damaged ones are skipped with a warning.

    `kind` defines the facts that a resumed run needs. Raises UsageError if permission is missing: to start from an
    earlier step, or anew, would lose work that is intact.
    """
    folder = run_dir / FOLDER
    for step in list_checkpoints(folder):
        try:
            verify(folder_of(folder, step), kind)
        except CorruptError as error:
            warnings.append(f"{error}; going back to the checkpoint before")
            continue
        return step
    return None


def read_shared(run_dir: Path, step: int) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the common arrays and the facts of a checkpoint."""
    folder = folder_of(run_dir / FOLDER, step)
    return read_arrays(folder / SHARED_FILE), read_json(folder / MANIFEST)["facts"]


def read_own(run_dir: Path, step: int, rank: int) -> dict[str, Array]:
    """Return a rank's own arrays; empty if fewer ranks wrote the checkpoint."""
    path = folder_of(run_dir / FOLDER, step) / own_file(rank)
    return read_arrays(path) if path.exists() else {}


def list_checkpoints(folder: Path) -> list[int]:
    """Return the steps of the finished checkpoints, newest first. Raises UsageError if permission is missing."""
    if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK):  # pathlib lists such a folder as an empty one
        raise _without_permission(folder, folder)
    numbers = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)


def folder_of(folder: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return folder / f"step-{step:010d}"


def own_file(rank: int) -> str:
    """Return the name of the file with a rank's own state."""
    return f"rank-{rank}.npz"


def verify(folder: Path, kind: type[Facts] | None = None) -> None:
    """Raise CorruptError for a file that is missing, cut short or changed, or a missing fact that `kind` needs.

    Raises UsageError for a file that this user may not read: it may well be intact.
    """
    try:
        document = read_json(folder / MANIFEST)
        if document["schema"] != SCHEMA:
            raise CorruptError(f"checkpoint {folder} has schema {document['schema']!r}, this hpcdl reads {SCHEMA!r}")
        files = _files_in(document, folder, kind)
    except CorruptError as error:
        if isinstance(error.__cause__, PermissionError):
            raise _without_permission(folder / MANIFEST, folder.parent) from error
        raise
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"checkpoint {folder} has no usable {MANIFEST} ({error})") from error
    for name, (size, digest) in files.items():
        path = folder / name
        try:
            sound = path.is_file() and path.stat().st_size == size and digest_of(path) == digest
        except PermissionError as error:
            raise _without_permission(path, folder.parent) from error
        except OSError as error:
            raise CorruptError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
        if not sound:
            raise CorruptError(f"checkpoint file {path} is damaged or missing")


def _without_permission(path: Path, checkpoints: Path) -> UsageError:
    return UsageError(
        f"{path} cannot be read: permission denied; ask its owner, or if it is yours, type "
        f"chmod -R u+rwX {shlex.quote(str(checkpoints))}"
    )


def _files_in(document: Mapping[str, Any], folder: Path, kind: type[Facts] | None) -> dict[str, tuple[int, str]]:
    """Return the files that a checkpoint.json lists; KeyError, TypeError or ValueError if it has been changed.

    Those of earlier versions have no digest, but the facts that a resumed run needs are checked all the same.
    """
    if "digest" in document and document["digest"] != own_digest(document):
        raise ValueError("its digest does not fit its content")
    # `isinstance` would let True pass as step 1.
    if type(document["step"]) is not int or folder_of(folder.parent, document["step"]) != folder:
        raise ValueError(f"it is that of step {document['step']!r}")
    check_facts(document["facts"], kind)
    files = {str(name): (size, digest) for name, (size, digest) in document["files"].items()}
    # A name with a slash would lead out of the folder.
    if SHARED_FILE not in files or any(Path(name).name != name for name in files):
        raise ValueError(f"it lists {', '.join(files)}")
    return files


def own_digest(document: Mapping[str, Any]) -> str:
    """Return the BLAKE2b of a checkpoint.json's canonical JSON without its own digest."""
    content = {key: value for key, value in document.items() if key != "digest"}
    # Sorted and compact: the file itself is indented, and its digest must not depend on the layout.
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


class _Hashed:
    """A file that is written sequentially and hashed at the same time."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.blake2b(digest_size=16)
        self.size = 0

    def write(self, content: bytes | memoryview) -> int:
        """Append `content`."""
        self.digest.update(content)
        self._file.write(content)
        self.size += len(content)
        return len(content)

    def flush(self) -> None:
        """Flush the buffer of the file."""
        self._file.flush()

    def close(self) -> None:
        """Do nothing: the caller that opened the file closes it."""


def write_arrays(path: Path, arrays: Mapping[str, Array], turn: AtOnce | None = None) -> tuple[int, str]:
    """Write an .npz durably, as numpy.savez does, in slices, each at a `turn`; return its size and digest.

    The digest covers the data to be written: errors of the disk are found when the file is read.
    """
    turn = turn or AtOnce()
    with creating(path) as file:
        hashed = _Hashed(file)
        # It cannot seek, so zipfile never goes back to fill in sizes that are hashed already.
        with zipfile.ZipFile(hashed, "w") as archive:
            for name, array in arrays.items():
                # C order, in which the content is written: for a transposed array the header would say Fortran order.
                _write_array(archive, name, numpy.asarray(array, order="C"), turn)
        turn.pause()  # waiting for the disk is not work
    return hashed.size, hashed.digest.hexdigest()


def _write_array(archive: zipfile.ZipFile, name: str, array: Array, turn: AtOnce) -> None:
    # The size is unknown at this point, and without ZIP64 zipfile fails at 2 GiB.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        numpy.lib.format.write_array_header_1_0(member, numpy.lib.format.header_data_from_array_1_0(array))
        content = array.reshape(-1).view(numpy.uint8).data
        for start in range(0, len(content), _SLICE_BYTES):
            turn()
            member.write(content[start : start + _SLICE_BYTES])


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise OSError if `num_bytes` more would leave less than a tenth of the storage of `folder` free."""
    space = os.statvfs(folder)
    # f_bavail, not f_bfree: some blocks are reserved for root.
    free = space.f_bavail * space.f_frsize - int(_RESERVE * space.f_blocks * space.f_frsize)
    if num_bytes > free:
        raise OSError(f"{format_bytes(num_bytes)} are needed, {format_bytes(max(0, free))} may be taken")


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of an .npz; CorruptError if it is damaged or compressed: `write_arrays` compresses nothing."""
    try:
        check_stored(path)
        with numpy.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    # MemoryError: a damaged header can claim a shape of any size.
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptError(f"checkpoint file {path} is damaged: {error}") from error


def digest_of(path: Path) -> str:
    """Return the BLAKE2b of a file's bytes, 32 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
