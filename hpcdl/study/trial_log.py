"""The log of a search: one JSON line per sample, appended by one process, so that a search can go on later.

Plain appends of one line and an fsync are safe on every shared file system; a line cut short by a crash is left out.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.study.trials import Outcome

SCHEMA = "hpcdl.trials/1"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One logged sample."""

    settings: Mapping[str, Any]
    outcome: Outcome


class TrialLog:
    """Appends entries to `path`; the header says which search they belong to."""

    def __init__(self, path: Path, header: Mapping[str, Any], *, resume: bool) -> None:
        self.path = path
        self._header = {"schema": SCHEMA, **header}
        if resume and path.exists():
            self.entries = _read(path, self._header)
            return
        self.entries = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(
                f"cannot write trial log {path}: {error.strerror}; choose another with --log FILE"
            ) from None
        self._append(self._header)

    def add(self, settings: Mapping[str, Any], outcome: Outcome) -> None:
        """Append one sample, durably."""
        values = {name: value for name, value in dataclasses.asdict(outcome).items() if value is not None}
        self._append({"settings": dict(settings), **values})

    def _append(self, document: Mapping[str, Any]) -> None:
        line = (json.dumps(document, allow_nan=False) + "\n").encode()
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(descriptor, line)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise UsageError(
                f"cannot write trial log {self.path}: {error.strerror}; choose another with --log FILE"
            ) from None


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write trial log {path}: {error.strerror}; choose another place with --log FILE")


def _read(path: Path, header: Mapping[str, Any]) -> list[Entry]:
    lines = path.read_bytes().split(b"\n")
    documents = []
    for number, line in enumerate(lines):
        try:
            documents.append(json.loads(line)) if line.strip() else None
        except ValueError:
            if number < len(lines) - 1 and any(rest.strip() for rest in lines[number + 1 :]):
                raise CorruptError(f"{path}, line {number + 1} is no JSON; start anew without --resume") from None
            _cut(path, len(b"\n".join(lines[:number])) + (1 if number else 0))
    found = documents[0] if documents else {}
    for key, value in header.items():
        if found.get(key) != value:
            raise UsageError(
                f"{path} belongs to another search ({key} {found.get(key)!r}, here {value!r}); drop --resume"
            )
    return [_entry(document, path) for document in documents[1:]]


def _cut(path: Path, size: int) -> None:
    """Drop a last line that a crash left unfinished, so that the next one starts on its own."""
    os.truncate(path, size)


def _entry(document: Mapping[str, Any], path: Path) -> Entry:
    fields = {item.name for item in dataclasses.fields(Outcome)}
    try:
        outcome = Outcome(**{name: value for name, value in document.items() if name in fields})
        return Entry(settings=dict(document["settings"]), outcome=outcome)
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} has a damaged entry ({error}); start anew without --resume") from None
