"""The log of a search, one JSON line per sample, so that it can continue later.

Appending one line with an fsync is safe on every shared file system. A line cut short by a crash is ignored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.records.from_json import from_json
from hpcdl.core.storage.disk import creating, cut, free_name, make_folder, move, open_to_append
from hpcdl.core.storage.files import parse_json, read_bytes
from hpcdl.core.units import counted
from hpcdl.tuning.trials import TrialOutcome

SCHEMA = "hpcdl.trials/1"
MOST_LOG_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class LoggedSample:
    """One logged sample."""

    settings: Mapping[str, Any]
    outcome: TrialOutcome


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The content of a log. `num_sound_bytes` end before a last line that a crash cut short."""

    header: Mapping[str, Any]
    entries: list[LoggedSample]
    num_sound_bytes: int


class TrialLog:
    """Appends entries to `path`. The header identifies the search that they belong to."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self._header = {"schema": SCHEMA, **header}
        if resume and path.exists():
            self.entries = _continued(path, self._header)
            return
        self.entries = []
        _set_aside(path)
        try:
            make_folder(path.parent)
            with creating(path) as file:
                file.write(_line(self._header))
        except OSError as error:
            raise UsageError(
                f"cannot write trial log {path}: {error.strerror}; choose another with --log FILE"
            ) from None

    def add(self, settings: Mapping[str, Any], outcome: TrialOutcome) -> None:
        """Append one sample, durably."""
        values = {name: value for name, value in dataclasses.asdict(outcome).items() if value is not None}
        self._append({"settings": dict(settings), **values})

    def _append(self, document: Mapping[str, Any]) -> None:
        try:
            descriptor = open_to_append(self.path)
            try:
                os.write(descriptor, _line(document))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UsageError(
                f"cannot write trial log {self.path}: {error.strerror}; choose another with --log FILE"
            ) from None


def _line(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, allow_nan=False) + "\n").encode()


def earlier_log(path: Path) -> Recorded | None:
    """Return the log of an earlier search, None if there is none. Raises UsageError for anything else, or a link."""
    if not path.is_symlink() and not path.exists():
        return None
    recorded = None
    with contextlib.suppress(OSError, HpcdlError):
        recorded = None if path.is_symlink() else read_log(path)
    if recorded is None or recorded.header.get("schema") != SCHEMA:
        raise UsageError(f"{path} exists and is not a trial log of hpcdl's; choose another with --log FILE")
    return recorded


def _set_aside(path: Path) -> None:
    """Rename the log of an earlier search that holds samples. Raises UsageError for anything but a log, or a link."""
    recorded = earlier_log(path)
    if recorded is not None and recorded.entries:
        aside, samples = free_name(path), counted(len(recorded.entries), "sample")
        move(path, aside)
        sys.stderr.write(f"hpcdl: {path} held {samples} of an earlier search, now in {aside}\n")


def read_log(path: Path) -> Recorded:
    """Return a log's content without changing it. Raises CorruptError for a damaged line, except the last one."""
    try:
        lines = read_bytes(path, MOST_LOG_BYTES).split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read trial log {path}: {error.strerror}") from None
    documents, sound = [], 0
    # Without its newline even a line that reads as whole is not: the next entry would be appended to it.
    for number, line in enumerate(lines[:-1], start=1):
        try:
            documents.append(parse_json(line)) if line.strip() else None
        except ValueError:
            if any(later_line.strip() for later_line in lines[number:]):
                raise CorruptError(f"{path}, line {number} is no JSON; start again without --resume") from None
            break
        sound += len(line) + 1
    header = documents[0] if documents else {}
    if not isinstance(header, dict):
        raise CorruptError(f"{path} does not begin with its header; start again without --resume")
    entries = [_entry(document, path) for document in documents[1:]]
    return Recorded(header=header, entries=entries, num_sound_bytes=sound)


def _continued(path: Path, header: Mapping[str, Any]) -> list[LoggedSample]:
    """Return the entries of a log of the same search. Drops a last line that was cut short, to append after it."""
    recorded = read_log(path)
    differing = [line for key, value in header.items() for line in _differences(key, recorded.header.get(key), value)]
    if differing:
        raise UsageError(f"{path} belongs to another search ({', '.join(differing)}); drop --resume")
    descriptor = open_to_append(path)
    try:
        cut(descriptor, recorded.num_sound_bytes)
    finally:
        os.close(descriptor)
    return recorded.entries


_WORDS = {"fingerprint": "another node", "engine": "another engine of TensorFlow", "devices": "other GPUs"}


def _differences(key: str, logged: object, here: object) -> list[str]:
    """Return in words how a part of a log's header differs from that of this search."""
    if logged == here:
        return []
    if isinstance(logged, dict) and isinstance(here, dict) and key not in _WORDS:
        return [line for name in here for line in _differences(name, logged.get(name), here[name])]
    was, now = ("not given" if value is None else value for value in (logged, here))
    return [_WORDS.get(key) or f"{key.replace('_', '-')} {was}, here {now}"]


def _entry(document: Mapping[str, Any], path: Path) -> LoggedSample:
    try:
        outcome = from_json(TrialOutcome, document)
        rate = outcome.images_per_second
        if (rate is None and outcome.status == "ok") or (rate is not None and not 0 < rate < math.inf):
            raise ValueError(f"images_per_second is {rate}")
        return LoggedSample(settings=dict(document["settings"]), outcome=outcome)
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} has a damaged entry ({error}); start again without --resume") from None
