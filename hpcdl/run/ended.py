"""How a rank and its run ended: state, exit code, the line that says most of an error, and the record's last words.

Whoever starts the ranks writes the record at its end, or the rank on its way out. A rank that is killed, or whose run
is ended by another one, cannot write; who has started the ranks knows why they ended. Where that is somebody else's
launcher, the rank that found the cause writes before it ends the job.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
    original,
    printable,
    without_place,
)
from hpcdl.core.processes.streams import caught
from hpcdl.core.records.run_record import (
    FAILED,
    FILE_NAME,
    FINISHED,
    LOST,
    RUNNING,
    STOPPED,
    TIME_FORMAT,
    RunRecord,
    read_record,
    write_record,
)
from hpcdl.run.faults import parse_faults, settled
from hpcdl.run.journal import events_since_start

_LOST_PEER = ("UnavailableError", "AbortedError", "CancelledError")
"""What TensorFlow's own engines raise when another rank is gone, by name: servers run without TensorFlow."""
_RAISED = re.compile(r"\w*(Error|Exception): ")
"""How Python names an error in a traceback."""


def verdict(error: BaseException) -> tuple[str, int]:
    """A rank's state and exit code after `error`."""
    error = original(error)
    if isinstance(error, StoppedEarly):
        return "stopped", error.exit_code
    if isinstance(error, (RankError, SilentExit)):
        return "bereaved", error.exit_code
    # TensorFlow makes an error of its own of a lost peer that the exchange has met: it keeps the class in its text.
    if type(error).__name__ in _LOST_PEER or f"{RankError.__name__}: " in str(error):
        return "bereaved", 1
    interrupted = Interrupted.exit_code if isinstance(error, KeyboardInterrupt) else 1
    return "failed", error.exit_code if isinstance(error, HpcdlError) else interrupted


def one_line(error: BaseException) -> str:
    """The line of an error that says most: the first, of TensorFlow's graphs what went wrong inside; with its class.

    Of several refusals at once all, behind each other.
    """
    error = original(error)
    if isinstance(error, ConfigError):
        return printable("; also: ".join(error.problems))
    if line := without_place(error):
        return line
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = lines[0]
    if text.startswith("Graph execution error"):
        before_node = [line for line in lines if "{{node" not in line]
        text = next((line for line in lines if _RAISED.match(line)), before_node[-1])
    return printable(text if isinstance(error, HpcdlError) else f"{type(error).__name__}: {text}".rstrip(": "))


Stamp = tuple[int, int] | None
"""Which file a record was, None for no record."""
_BEFORE_IT_BEGAN = (UsageError, Interrupted, KeyboardInterrupt)
"""What a run that goes on can be refused or stopped by before its ranks have written anything."""


@contextlib.contextmanager
def end_noted(run_dir: Path, blank: Callable[[], RunRecord]) -> Iterator[None]:
    """Inside, a run goes on; an error that ends it stands in its record, `blank` where the ranks wrote none."""
    before = stamp_of(run_dir)
    try:
        yield
    except BaseException as error:
        note_end(run_dir, error, before=before, blank=blank)
        raise


def stamp_of(run_dir: Path) -> Stamp:
    """The record's file, to tell later whether it was written anew."""
    with contextlib.suppress(OSError):
        found = (run_dir / FILE_NAME).stat()
        return found.st_ino, found.st_mtime_ns
    return None


def note_end(
    run_dir: Path,
    error: BaseException,
    *,
    before: Stamp = None,
    blank: Callable[[], RunRecord] | None = None,
    message: str = "",
) -> None:
    """Write into the record in `run_dir` that `error` has ended the run, unless another rank has said why before.

    What a run before this one has left, `before`, stays where this one was refused, or where it was finished.
    """
    error = original(error)
    refused = getattr(error, "exit_code", 1) == UsageError.exit_code  # by ranks too, before anything is trained
    with caught(lambda _: None):  # a second signal must not break it off
        try:
            record = read_record(run_dir)
        except CorruptError:
            if blank is None or refused:
                return
            record = blank()
        untouched = before is not None and before == stamp_of(run_dir)
        if untouched and (refused or isinstance(error, _BEFORE_IT_BEGAN) or record.status == FINISHED):
            return
        if blank is None and record.status != RUNNING:
            return
        state = STOPPED if isinstance(error, StoppedEarly) else FAILED
        _write(run_dir, record, state, message or message_of(error), kind_of(error) if state == FAILED else "")


def note_lost(run_dir: Path, message: str) -> None:
    """Write into the record in `run_dir`, where there is one, that all of the run's processes are gone."""
    with contextlib.suppress(CorruptError):
        _write(run_dir, read_record(run_dir), LOST, message)


def _write(run_dir: Path, record: RunRecord, status: str, message: str, failure: str = "") -> None:
    warnings = record.warnings
    with contextlib.suppress(ConfigError):  # of a damaged record
        faults = parse_faults(str(record.config.get("inject", "")), record.ranks)
        warnings = settled(warnings, faults, run_dir)
    ended = dataclasses.replace(
        record,
        warnings=warnings,
        status=status,
        message=message,
        failure=failure,
        finished_at=time.strftime(TIME_FORMAT),
        steps=max(record.steps, _steps_done(run_dir)),
    )
    try:
        write_record(run_dir, ended)
    except OSError as problem:  # readers find that nobody writes it any more
        sys.stderr.write(f"hpcdl: warning: cannot write {run_dir / FILE_NAME}: {problem.strerror or problem}\n")


def message_of(error: BaseException) -> str:
    """One line about what has ended a run."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C"
    if line := without_place(error):
        return line
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if isinstance(error, HpcdlError):
        return printable("; ".join(lines))
    return printable(": ".join([type(error).__name__, *lines[:1]]))


def _steps_done(run_dir: Path) -> int:
    """The last step that the run is known to have done: of its journal, or of its newest checkpoint."""
    reached = [event.get("step", 0) for event in events_since_start(run_dir) if event.get("kind") in ("step", "epoch")]
    saved = list_checkpoints(run_dir / FOLDER)
    return max(*(step for step in reached if isinstance(step, int)), *saved, 0, 0)
