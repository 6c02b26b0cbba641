"""The progress of a study: one JSON file beside its runs, replaced atomically whenever a run begins or ends."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.config.study import Study
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.records.from_json import read_as
from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.core.storage.files import write_json
from hpcdl.data.format.manifest import FILE_NAME as MANIFEST
from hpcdl.data.format.manifest import read_manifest
from hpcdl.study.choice import TRIES
from hpcdl.study.plan import PlannedRun, StudyPoint, StudyRuns

SCHEMA = "hpcdl.study/1"
FILE_NAME = "study.json"
RUNS = "runs"
_FOLDERS = {RUNS, "trials", "tries", "failed", "logs"}
"""Empty folders of these names are left by a call that found no room for its first file."""
RECORD_LOST = "it had finished, but its record is missing or damaged"
"""The message of a run that waits again although it had finished."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One run: waiting, running, finished or failed. `attempts` counts failed ones, `message` gives the last reason."""

    name: str
    point: int
    repeat: int
    status: str = "waiting"
    attempts: int = 0
    seconds: float | None = None
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class StudyState:
    """A study's file. `digest` identifies the plan and the runs' settings, `mark` all processes of the runs."""

    schema: str = SCHEMA
    name: str
    mode: str
    origin: str
    digest: str
    mark: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    runs: Sequence[RunState] = ()

    def count(self, status: str) -> int:
        """Return the number of runs with `status`."""
        return sum(run.status == status for run in self.runs)

    def run(self, name: str) -> RunState:
        """Return the state of one run."""
        return next(run for run in self.runs if run.name == name)

    def changed(self, name: str, **values: Any) -> StudyState:
        """Return the state with some values of one run replaced."""
        runs = [dataclasses.replace(run, **values) if run.name == name else run for run in self.runs]
        return dataclasses.replace(self, runs=runs)


def open_study(folder: Path, study: Study, plan: StudyRuns, *, resume: bool) -> StudyState:
    """Return the initial state; write nothing. Raises UsageError if `folder` holds a study and `resume` is not set."""
    if (folder / FILE_NAME).exists():
        if resume:
            return _resumed_state(folder, study, plan)
        raise UsageError(f"{folder} holds a study; continue with --resume, or choose another --out DIR")
    if not is_new(folder):
        raise UsageError(f"{folder} exists and holds no study; choose another --out DIR")
    return new_state(study, plan)


def is_new(folder: Path) -> bool:
    """Return whether nothing is under this name, or a folder without any file."""
    # Not `exists`: a link to nowhere takes the name as well.
    if not os.path.lexists(folder):
        return True
    return folder.is_dir() and all(
        path.name in _FOLDERS and path.is_dir() and not path.is_symlink() and not any(path.iterdir())
        for path in folder.iterdir()
    )


def new_state(study: Study, plan: StudyRuns) -> StudyState:
    """Return the state of a study before its first run."""
    return StudyState(
        name=study.name,
        mode=study.plan.mode,
        origin=study.origin,
        digest=digest_of(study, plan),
        mark=uuid.uuid4().hex,
        settings=dict(study.train),
        left_out=tuple(plan.left_out),
        runs=[RunState(name=run.name, point=run.point.number, repeat=run.repeat) for run in plan.runs],
    )


def write_state(folder: Path, state: StudyState) -> None:
    """Replace the state file in `folder`."""
    write_json(folder / FILE_NAME, dataclasses.asdict(state))


def read_state(folder: Path) -> StudyState:
    """Return the state in `folder`. Raises CorruptError if it is damaged or of another schema."""
    return read_as(StudyState, folder / FILE_NAME, SCHEMA, "; choose another --out DIR")


def _resumed_state(folder: Path, study: Study, plan: StudyRuns) -> StudyState:
    """Return the state to continue with; more repeats come after the earlier runs.

    Raises UsageError if `folder` holds another study: settings would mix.
    """
    state = read_state(folder)
    # Each further repeat of all points comes after the earlier ones (plan.py), so the known runs are the first ones.
    known, added = plan.runs[: len(state.runs)], plan.runs[len(state.runs) :]
    if state.digest != digest_of(study, dataclasses.replace(plan, runs=known)):
        raise UsageError(
            f"{folder} holds runs of a study with another matrix, other settings or more repeats ({state.origin}); "
            "choose another --out DIR, or give the earlier study"
        )
    if added:
        check_tries(folder, study)
    more = [RunState(name=run.name, point=run.point.number, repeat=run.repeat) for run in added]
    state = dataclasses.replace(state, digest=digest_of(study, plan), runs=[*state.runs, *more])
    records = []
    for run in plan.runs:
        if state.run(run.name).status != "finished":
            continue
        if (record := _kept_record(run_folder(folder, run))) is None:
            state = state.changed(run.name, status="waiting", seconds=None, message=RECORD_LOST)
        else:
            records.append(record)
    # A finished study trains no more, so its data may be gone.
    if len(records) < len(plan.runs):
        check_same_data(folder, records)
    return state


def check_tries(folder: Path, study: Study) -> None:
    """Raise UsageError if more repeats of `study` would have seeds that its tries had."""
    if study.choice:
        raise UsageError(f"{folder}: a study with [choose] keeps its repeats; choose another --out DIR")


def check_same_data(folder: Path, finished: Iterable[RunRecord]) -> None:
    """Raise UsageError if a data folder's samples changed since runs in `folder` trained on them: results would mix."""
    trained: dict[str, set[str]] = {}
    for record in finished:
        trained.setdefault(str(record.config.get("data", "")), set()).add(record.data_checksum)
    for data, checksums in trained.items():
        data_folder = Path(data).expanduser()
        if data and (data_folder / MANIFEST).is_file() and checksums - {"", read_manifest(data_folder)[1]}:
            raise UsageError(
                f"{data} holds other data than when runs in {folder} trained on it; give the data as they were, or "
                "choose another --out DIR"
            )


def run_folder(folder: Path, run: PlannedRun) -> Path:
    """Return the folder of a run of the study in `folder`."""
    return folder / (TRIES if run.point.tried_for else RUNS) / run.name


def _kept_record(run_dir: Path) -> RunRecord | None:
    """Return the record of a finished run; None if it is gone or damaged: then nothing was measured."""
    try:
        record = read_record(run_dir)
    except CorruptError:
        return None
    return record if record.status == "finished" else None


def digest_of(study: Study, plan: StudyRuns) -> str:
    """Return a digest of what two calls of one study must share: its points, their order and the runs' settings."""
    runs = [[run.name, _identity(run.point)] for run in plan.runs]
    text = json.dumps([study.plan.mode, runs, dict(study.train)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _identity(point: StudyPoint) -> dict[str, Any]:
    """Return a point without unset fields, so that old studies continue, and without its node's choices."""
    fields = dataclasses.asdict(point)
    del fields["shared_threads"]
    return {key: value for key, value in fields.items() if value or key not in ("settings", "tried_for")}
