"""The end of a rank and of its run: state, exit code, the most useful line of an error, and the record's final state.

The process that starts the ranks writes the record at the end of the run, or the rank when it exits. A rank that is
killed, or that another rank ends, cannot write, but the process that started the ranks knows the reason. Under another
launcher, the rank that found the cause writes the record before it ends the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.folders import FOLDER, list_checkpoints
from hpcdl.comm.agree import SilentExit
from hpcdl.core.errors import (
    ConfigError,
    CorruptError,
    HpcdlError,
    Interrupted,
    RankError,
    StoppedEarly,
    UsageError,
    kind_of,
    lines_of,
    original,
    printable,
    without_place,
)
from hpcdl.core.processes.streams import caught
from hpcdl.core.records.from_json import from_json
from hpcdl.core.records.run_record import (
    FAILED,
    FILE_NAME,
    FINISHED,
    LOST,
    RUNNING,
    STOPPED,
    TIME_FORMAT,
    HistoryPoint,
    RunRecord,
    read_record,
    write_record,
)
from hpcdl.run.faults import parse_faults, settled
from hpcdl.run.journal import all_events, since_start

_LOST_PEER = ("UnavailableError", "AbortedError", "CancelledError")
"""Names of the errors that TensorFlow's engines raise when another rank is gone; names, as servers lack TensorFlow."""
_RAISED = re.compile(r"\w*(Error|Exception): ")
"""The form in which Python names an error in a traceback."""


def verdict(error: BaseException) -> tuple[str, int]:
    """Return a rank's state and exit code after `error`."""
    error = original(error)
    if isinstance(error, StoppedEarly):
        return "stopped", error.exit_code
    if isinstance(error, (RankError, SilentExit)):
        return "bereaved", error.exit_code
    # TensorFlow wraps the error of a lost peer in one of its own, whose text keeps the name of the class.
    if type(error).__name__ in _LOST_PEER or f"{RankError.__name__}: " in str(error):
        return "bereaved", 1
    interrupted = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
    return "failed", error.exit_code if isinstance(error, HpcdlError) else interrupted


def one_line(error: BaseException) -> str:
    """Return the most useful line of an error, with its class.

    It is the first line, or for TensorFlow's graphs the inner error. For several problems at once, return them all.
    """
    error = original(error)
    if isinstance(error, ConfigError):
        return printable("; also: ".join(error.problems))
    if line := without_place(error):
        return line
    lines = lines_of(error) or [""]
    text = lines[0]
    if text.startswith("Graph execution error"):
        before_node = list(itertools.takewhile(lambda line: "{{node" not in line, lines))
        text = next((line for line in lines if _RAISED.match(line)), before_node[-1])
    return printable(text if isinstance(error, HpcdlError) else f"{type(error).__name__}: {text}".rstrip(": "))


Stamp = tuple[int, int] | None
"""Identity of a record's file (inode and modification time), None for no record."""
_BEFORE_IT_BEGAN = (UsageError, Interrupted, KeyboardInterrupt)
"""Errors that can end the resume of a run before its ranks have written anything."""


@contextlib.contextmanager
def end_noted(run_dir: Path, blank: Callable[[], RunRecord]) -> Iterator[None]:
    """Record an error that ends the run while the context is open; `blank` makes a record if the ranks wrote none."""
    before = stamp_of(run_dir)
    try:
        yield
    except BaseException as error:
        note_end(run_dir, error, before=before, blank=blank)
        raise


def stamp_of(run_dir: Path) -> Stamp:
    """Return the identity of the record's file, to detect later whether it was rewritten."""
    with contextlib.suppress(OSError):
        status = (run_dir / FILE_NAME).stat()
        return status.st_ino, status.st_mtime_ns
    return None


def note_end(
    run_dir: Path,
    error: BaseException,
    *,
    before: Stamp = None,
    blank: Callable[[], RunRecord] | None = None,
    message: str = "",
) -> None:
    """Note in the record in `run_dir` that `error` ended the run, unless another rank gave the reason before.

    `before` identifies the record of an earlier start. That record stays if this start was refused, or if it is
    finished.
    """
    error = original(error)
    refused = getattr(error, "exit_code", 1) == UsageError.exit_code  # ranks may refuse too, before any training
    with caught(lambda _: None):  # a second signal must not interrupt this
        try:
            record = read_record(run_dir)
        except CorruptError:
            if blank is None or refused:
                return
            record = blank()
        untouched = before is not None and before == stamp_of(run_dir)
        if untouched and (refused or isinstance(error, _BEFORE_IT_BEGAN) or record.status == FINISHED):
            return
        # An end is noted already: later errors usually follow from it.
        if blank is None and record.status != RUNNING:
            return
        state = STOPPED if isinstance(error, StoppedEarly) else FAILED
        _write(run_dir, record, state, message or message_of(error), kind_of(error) if state == FAILED else "")


def note_lost(run_dir: Path, message: str) -> None:
    """Note in the record in `run_dir`, if it has one, that all processes of the run are gone."""
    with contextlib.suppress(CorruptError):
        _write(run_dir, read_record(run_dir), LOST, message)


def _write(run_dir: Path, record: RunRecord, status: str, message: str, failure: str = "") -> None:
    warnings = record.warnings
    with contextlib.suppress(ConfigError):  # a damaged record may hold invalid faults
        faults = parse_faults(str(record.config.get("inject", "")), record.ranks)
        warnings = settled(warnings, faults, run_dir)
    events = all_events(run_dir)
    ended = dataclasses.replace(
        record,
        warnings=warnings,
        status=status,
        message=message,
        failure=failure,
        finished_at=time.strftime(TIME_FORMAT),
        # Events of this start alone: an earlier one may have been further, before a --from-step.
        steps=max(record.steps, _steps_done(run_dir, since_start(events))),
        history=_history(events) or record.history,
    )
    try:
        write_record(run_dir, ended)
    except OSError as problem:  # readers will see that no process holds the run any more
        sys.stderr.write(f"hpcdl: warning: cannot write {run_dir / FILE_NAME}: {problem.strerror or problem}\n")


def message_of(error: BaseException) -> str:
    """Return one line about the error that ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if line := without_place(error):
        return line
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, HpcdlError):
        return printable("; ".join(lines))
    return printable(": ".join([type(error).__name__, *lines[:1]]))


def _steps_done(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> int:
    """Return the last step that the run is known to have completed, from its journal or its newest checkpoint."""
    reached = [event.get("step", 0) for event in events if event.get("kind") in ("step", "epoch")]
    saved = []
    with contextlib.suppress(UsageError):  # a folder that cannot be read must not hide why the run ended
        saved = list_checkpoints(run_dir / FOLDER)
    # two zeros, because max takes no single number
    return max(*(step for step in reached if isinstance(step, int)), *saved, 0, 0)


def _history(events: Iterable[Mapping[str, Any]]) -> list[HistoryPoint]:
    """Return the epochs of a journal; of an epoch that was trained again after a resume, the last time."""
    points = list[HistoryPoint]()
    for event in events:
        if event.get("kind") == "epoch":
            with contextlib.suppress(ValueError):  # a damaged line must not hide why the run ended
                point = from_json(HistoryPoint, event)
                # An epoch that was trained again replaces itself and all that followed.
                while points and points[-1].epoch >= point.epoch:
                    points.pop()
                points.append(point)
    return points
