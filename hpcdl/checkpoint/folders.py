"""Checkpoints: folders that are whole or absent, checked on reading, written while training goes on.

`checkpoints/step-0000001200/` holds `shared.npz` (what all ranks have in common, by rank 0), `rank-R.npz` (what is a
rank's own) and `checkpoint.json`, which is written last and lists every file with its size and BLAKE2b digest. The
folder has a temporary name until then. See docs/reference/checkpoints.md.

The facts in a checkpoint.json: what a run that goes on has to find there, and of which type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy

from hpcdl.checkpoint.background import THREAD, AtOnce, BackgroundJob, BackgroundWork, Turn
from hpcdl.comm.observed import observe
from hpcdl.core.errors import CorruptError, RankError
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
    """Of `hpcdl train`; what has a default is missing in checkpoints of earlier versions."""

    ranks: int
    global_batch: int
    steps_per_epoch: int
    seconds: float
    history: Sequence[HistoryPoint]
    shift: int = 0
    buckets: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AsynchronousFacts(TrainFacts):
    """Of `hpcdl train` with a strategy whose workers go on by the center's count of updates."""

    count: int
    evaluated_count: int = -1


@dataclass(frozen=True, kw_only=True)
class ScriptFacts:
    """Of a script's hpcdl.State."""

    ranks: int
    values: Mapping[str, Any]
    rates: Sequence[Sequence[float] | None] = ()
    moves: Sequence[Sequence[int] | None] = ()


Facts = TrainFacts | ScriptFacts
_AT_LEAST = {"ranks": 1, "global_batch": 1, "steps_per_epoch": 1, "evaluated_count": -1, "shift": -_MOST}
"""What numbers start at, where it is not 0."""
_STAND_IN = {
    "ranks": 1, "global_batch": 1, "steps_per_epoch": 1, "seconds": 0.0, "history": [], "count": 0, "values": {},
}  # fmt: skip


def check_facts(facts: Any, kind: type[Facts] | None = None) -> None:
    """TypeError or ValueError names what a run of this `kind` misses in `facts`, or what cannot be.

    Where nobody knows the kind, what is there has to be right.
    """
    if not isinstance(facts, dict):
        raise TypeError("its facts are no object")
    missing = [item.name for item in dataclasses.fields(kind or TrainFacts) if _is_needed(item, facts)]
    if kind is not None and missing:
        raise ValueError(f"its facts have no {', '.join(missing)}")
    found = from_json(kind, facts) if kind else from_json(_kind_of(facts), {**_STAND_IN, **facts})
    for name, value in vars(found).items():
        if isinstance(value, int | float) and not _AT_LEAST.get(name, 0) <= value <= _MOST:
            raise ValueError(f"{name} is {value!r}")


def kind_for(*, synchronous: bool) -> type[TrainFacts]:
    """What a run of `hpcdl train` needs, by its strategy."""
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
"""What is written and hashed in one go: less than half a millisecond's work."""
HOLDS = r"(shared|rank-\d+)\.npz|checkpoint\.json|\..+\.tmp"
"""What lies in a checkpoint's folder."""
SAVED = ".hpcdl-saved"
"""Beside the folder of checkpoints: the step of the newest, so that a folder that is gone is missed."""
_STEP = r"step-\d{10}"
_RESERVE = 0.1
"""Part of the nodes' memory that is left free."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state after `step` steps. `shared` matters on rank 0 alone, `own` on every rank, `facts` is JSON."""

    step: int
    shared: Mapping[str, Array] = field(default_factory=dict)
    own: Mapping[str, Array] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class CheckpointWriter:
    """Writes snapshots as `work` does what has time, one at a time; collective over `communicator`.

    A disk that fails costs a warning, never the run: the last good checkpoint stays. `before` is called with the step
    before anything is written, and may raise OSError.
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
        """Step of the newest checkpoint that is durable, as every rank knows."""

    @property
    def is_writing(self) -> bool:
        """Whether what was started is still on its way."""
        return self._job is not None and self._job.continues

    def start(self, snapshot: Snapshot, patience_s: float = 0.0) -> None:
        """Begin to write `snapshot`, whose arrays nobody changes any more; waits for the one before.

        For `patience_s` it may wait for gaps.
        """
        self.wait()
        self._job = self._work.start("checkpoint", lambda turn: self._write(snapshot, turn), patience_s)

    def wait(self) -> None:
        """Return when what was started is durable, or has failed and left a warning; it hurries from now on."""
        job, self._job = self._job, None
        if job is not None:
            job.wait()

    def abandon(self) -> None:
        """Return when nothing is being written any more, done or not: the group is revoked."""
        with contextlib.suppress(RankError):
            self.wait()

    def _gather(self, turn: Turn, value: Any) -> list[Any]:
        """Every rank's `value`; a rank that is done long before another leaves its core to the steps meanwhile."""
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
            problem = f"{error.strerror or error} (rank {self._communicator.rank} on {self._communicator.host})"
        gathered = self._gather(turn, [problem, files])
        problem = next((text for text, _ in gathered if text), "")
        done = False
        if self._communicator.rank == 0:
            done = self._finish(snapshot, temporary, problem, {k: v for _, part in gathered for k, v in part.items()})
        if self._gather(turn, done)[0]:
            self.newest = snapshot.step

    def _write_arrays(self, folder: Path, snapshot: Snapshot, turn: Turn) -> dict[str, Any]:
        """Write this rank's files; their sizes and digests by name."""
        self._before(snapshot.step)
        files = {}
        if self._communicator.rank == 0:
            files[SHARED_FILE] = write_arrays(folder / SHARED_FILE, snapshot.shared, turn)
        own = own_file(self._communicator.rank)
        files[own] = write_arrays(folder / own, snapshot.own, turn)
        return files

    def _begin(self, step: int) -> tuple[str, str]:
        """Rank 0 makes the folder under a name that nobody can guess; that name, and what went wrong."""
        name = temporary_name(f"step-{step:010d}")
        try:
            if self._folder.parent.is_dir():  # a run directory that is gone is not made again
                make_folder(self._folder)
            (self._folder / name).mkdir()
        except OSError as error:
            return "", f"{error.strerror or error} (rank 0 on {self._communicator.host})"
        return name, ""

    def _finish(self, snapshot: Snapshot, temporary: Path, problem: str, files: Mapping[str, Any]) -> bool:
        """Give the checkpoint its name; False, and a warning, where that or what came before has failed."""
        try:
            if problem:
                raise OSError(problem)
            document = {"schema": SCHEMA, "step": snapshot.step, "facts": snapshot.facts, "files": files}
            write_json(temporary / MANIFEST, {**document, "digest": own_digest(document)})
            remove(self._folder, snapshot.step)
            move(temporary, folder_of(self._folder, snapshot.step))
            touch(self._folder.with_name(SAVED), f"{snapshot.step}\n".encode())
            self._remove_old(snapshot.step)
        except OSError as error:
            if temporary.name != FOLDER:  # it has been made
                remove_folder(temporary, HOLDS)
            self.warnings.append(
                f"no checkpoint at step {snapshot.step}: {error.strerror or error}; the one before stays"
            )
            return False
        return True

    def _remove_old(self, newest: int) -> None:
        """Those beyond `keep`; and those of later steps, which are older: on more ranks a run has fewer steps."""
        steps = list_checkpoints(self._folder)
        later = [step for step in steps if step > newest]
        for old in (*later, *steps[len(later) + self._keep :]):
            remove(self._folder, old)


def remove(folder: Path, step: int) -> None:
    """Remove a checkpoint that the run has made; one that holds anything else stays, to the last file."""
    remove_folder(folder_of(folder, step), HOLDS)


def sweep_unfinished(run_dir: Path) -> list[str]:
    """Remove what killed ranks had begun to save; the caller holds the run directory."""
    swept = sweep(run_dir / FOLDER, _STEP)
    # Earlier versions named the folder by its step alone.
    for path in sorted((run_dir / FOLDER).glob(".step-*.tmp")):
        if re.fullmatch(rf"\.{_STEP}\.tmp", path.name) and not remove_folder(path, HOLDS):
            swept.append(path.name)
    return swept


def what_is_missing(run_dir: Path) -> str:
    """What has become of the checkpoints that were saved in `run_dir`; empty where none is missed."""
    folder, saved = run_dir / FOLDER, ""
    if folder.is_symlink() and not folder.exists():
        return f"{folder} is a link to {folder.readlink()}, which is not there"
    with contextlib.suppress(OSError):
        saved = (run_dir / SAVED).read_text(encoding="ascii", errors="replace").strip()
    if not saved or list_checkpoints(folder):
        return ""
    return f"{run_dir} has saved up to step {saved}, and {folder} {'is empty' if folder.exists() else 'is gone'}"


def set_aside(run_dir: Path) -> Path | None:
    """Give the checkpoints of a run that is to begin anew another name; that name, None where there are none."""
    folder = run_dir / FOLDER
    remove_file(run_dir / SAVED)
    if not folder.is_symlink() and not folder.exists():
        return None
    aside = free_name(folder)
    move(folder, aside)
    return aside


def newest_valid(run_dir: Path, warnings: list[str], kind: type[Facts] | None = None) -> int | None:
    """Step of the newest checkpoint that passes its check; a damaged one is passed over with a warning.

    `kind` declares what a run that goes on from it needs.
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
    """The common arrays and the facts of a checkpoint."""
    folder = folder_of(run_dir / FOLDER, step)
    return read_arrays(folder / SHARED_FILE), read_json(folder / MANIFEST)["facts"]


def read_own(run_dir: Path, step: int, rank: int) -> dict[str, Array]:
    """A rank's own arrays; empty where the checkpoint was written by fewer ranks."""
    path = folder_of(run_dir / FOLDER, step) / own_file(rank)
    return read_arrays(path) if path.exists() else {}


def list_checkpoints(folder: Path) -> list[int]:
    """Steps of the finished checkpoints, newest first."""
    found = (path.name.removeprefix("step-") for path in folder.glob("step-*"))
    return sorted((int(number) for number in found if number.isdigit()), reverse=True)


def folder_of(folder: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return folder / f"step-{step:010d}"


def own_file(rank: int) -> str:
    """Name of the file with a rank's own state."""
    return f"rank-{rank}.npz"


def verify(folder: Path, kind: type[Facts] | None = None) -> None:
    """CorruptError names the file that is missing, cut short or changed, or the fact that a run of `kind` needs."""
    try:
        document = read_json(folder / MANIFEST)
        if document["schema"] != SCHEMA:
            raise CorruptError(f"checkpoint {folder} has schema {document['schema']!r}, this hpcdl reads {SCHEMA!r}")
        files = _files_in(document, folder, kind)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(f"checkpoint {folder} has no usable {MANIFEST} ({error})") from error
    for name, (size, digest) in files.items():
        path = folder / name
        try:
            sound = path.is_file() and path.stat().st_size == size and digest_of(path) == digest
        except OSError as error:
            raise CorruptError(f"checkpoint file {path} cannot be read: {error.strerror}") from error
        if not sound:
            raise CorruptError(f"checkpoint file {path} is damaged or missing")


def _files_in(document: Mapping[str, Any], folder: Path, kind: type[Facts] | None) -> dict[str, tuple[int, str]]:
    """The files that a checkpoint.json lists; KeyError, TypeError and ValueError where it is not as it was written.

    One of an earlier version has no digest: what a resumed run takes from it is looked at all the same.
    """
    if "digest" in document and document["digest"] != own_digest(document):
        raise ValueError("its digest does not fit its content")
    if type(document["step"]) is not int or folder_of(folder.parent, document["step"]) != folder:
        raise ValueError(f"it is that of step {document['step']!r}")
    check_facts(document["facts"], kind)
    files = {str(name): (size, digest) for name, (size, digest) in document["files"].items()}
    if SHARED_FILE not in files or any(Path(name).name != name for name in files):
        raise ValueError(f"it lists {', '.join(files)}")
    return files


def own_digest(document: Mapping[str, Any]) -> str:
    """BLAKE2b of a checkpoint.json's content, without its own digest: of its canonical JSON."""
    content = {key: value for key, value in document.items() if key != "digest"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(canonical.encode(), digest_size=16).hexdigest()


class _Hashed:
    """A file that is written from its begin to its end, and hashed on the way."""

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
        """Hand on what the file keeps."""
        self._file.flush()

    def close(self) -> None:
        """The file is closed by who has opened it."""


def write_arrays(path: Path, arrays: Mapping[str, Array], turn: AtOnce | None = None) -> tuple[int, str]:
    """Write an .npz durably, as numpy.savez does, slice by slice at `turn`; returns its size and digest.

    The digest is of what was meant to be written: what a disk makes of it is found when it is read.
    """
    turn = turn or AtOnce()
    with creating(path) as file:
        hashed = _Hashed(file)
        with zipfile.ZipFile(hashed, "w") as archive:
            for name, array in arrays.items():
                _write_array(archive, name, numpy.asarray(array, order="C"), turn)
        turn.pause()  # what the disk takes until it is there is not work
    return hashed.size, hashed.digest.hexdigest()


def _write_array(archive: zipfile.ZipFile, name: str, array: Array, turn: AtOnce) -> None:
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
        numpy.lib.format.write_array_header_1_0(member, numpy.lib.format.header_data_from_array_1_0(array))
        content = array.reshape(-1).view(numpy.uint8).data
        for start in range(0, len(content), _SLICE_BYTES):
            turn()
            member.write(content[start : start + _SLICE_BYTES])


def check_room(folder: Path, num_bytes: int) -> None:
    """OSError where so many more bytes would leave less than a tenth of the storage of `folder` free."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize - int(_RESERVE * found.f_blocks * found.f_frsize)
    if num_bytes > free:
        raise OSError(f"{format_bytes(num_bytes)} are needed, {format_bytes(max(0, free))} may be taken")


def read_arrays(path: Path) -> dict[str, Array]:
    """The arrays of an .npz; CorruptError where it is damaged, or packed: `write_arrays` packs nothing."""
    try:
        check_stored(path)
        with numpy.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        raise CorruptError(f"checkpoint file {path} is damaged: {error}") from error


def digest_of(path: Path) -> str:
    """BLAKE2b of a file's bytes, 32 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
