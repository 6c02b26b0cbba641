"""The log of a search: one JSON line per sample, appended by one process, so that a search can go on later.

Plain appends of one line and an fsync are safe on every shared file system; a line cut short by a crash is left out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.records.from_json import from_json
from hpcdl.core.storage.disk import creating, cut, make_folder, open_to_append
from hpcdl.core.storage.files import parse_json, read_bytes
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
    """A log as it stands: `num_sound_bytes` end before a last line that a crash cut short."""

    header: Mapping[str, Any]
    entries: list[LoggedSample]
    num_sound_bytes: int


class TrialLog:
    """Appends entries to `path`; the header says which search they belong to."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self._header = {"schema": SCHEMA, **header}
        if resume and path.exists():
            self.entries = _continued(path, self._header)
            return
        self.entries = []
        _check_replaceable(path)
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


def _check_replaceable(path: Path) -> None:
    """UsageError where `path` holds anything but the log of an earlier search, or is a link."""
    if not path.is_symlink() and not path.exists():
        return
    with contextlib.suppress(OSError, HpcdlError):
        if not path.is_symlink() and read_log(path).header.get("schema") == SCHEMA:
            return
    raise UsageError(f"{path} exists and is not a trial log of hpcdl's; choose another with --log FILE")


def read_log(path: Path) -> Recorded:
    """What a log holds, the log left as it is. CorruptError names the line that is damaged, the last one excepted."""
    try:
        lines = read_bytes(path, MOST_LOG_BYTES).split(b"\n")
    except OSError as error:
        raise UsageError(f"cannot read trial log {path}: {error.strerror}") from None
    documents, sound = [], 0
    for number, line in enumerate(lines, start=1):
        try:
            documents.append(parse_json(line)) if line.strip() else None
        except ValueError:
            if any(rest.strip() for rest in lines[number:]):
                raise CorruptError(f"{path}, line {number} is no JSON; start anew without --resume") from None
            break
        sound += len(line) + 1
    header = documents[0] if documents else {}
    if not isinstance(header, dict):
        raise CorruptError(f"{path} does not begin with its header; start anew without --resume")
    entries = [_entry(document, path) for document in documents[1:]]
    return Recorded(header=header, entries=entries, num_sound_bytes=min(sound, path.stat().st_size))


def _continued(path: Path, header: Mapping[str, Any]) -> list[LoggedSample]:
    """The entries of a log of this very search; a last line cut short is dropped, so that the next stands alone."""
    recorded = read_log(path)
    for key, value in header.items():
        found = recorded.header.get(key)
        if found != value:
            raise UsageError(f"{path} belongs to another search ({key} {found!r}, here {value!r}); drop --resume")
    descriptor = open_to_append(path)
    try:
        cut(descriptor, recorded.num_sound_bytes)
    finally:
        os.close(descriptor)
    return recorded.entries


def _entry(document: Mapping[str, Any], path: Path) -> LoggedSample:
    try:
        outcome = from_json(TrialOutcome, document)
        rate = outcome.images_per_second
        if (rate is None and outcome.status == "ok") or (rate is not None and not 0 < rate < math.inf):
            raise ValueError(f"images_per_second is {rate}")
        return LoggedSample(settings=dict(document["settings"]), outcome=outcome)
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} has a damaged entry ({error}); start anew without --resume") from None
