"""A CSV file of file,label (and, if a third column is there, split); files lie beside it or where they say."""

from __future__ import annotations

import csv
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.files import open_regular
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base import SourceFacts, SourceSpec
from hpcdl.data.sources.flat import class_numbers
from hpcdl.data.sources.image_folder import CHECKED_AT_ONCE, SPLIT_NAMES, WholeFiles, check_magic
from hpcdl.data.sources.index import Index, IndexWriter

_HEADS = ({"file", "label"}, {"filename", "label"}, {"path", "label"})
_BATCH = 4096
LONGEST_LINE = 1 << 20
_WHOLE = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"[+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?|")
_SPLIT = re.compile(r"\w[\w-]{0,63}")
"""It names a folder."""
_Batch = dict[str, tuple[list[int], list[tuple[bytes, int, int]]]]
"""Split to labels and files."""


class CsvSource:
    """Image files that a table lists."""

    def __init__(self, spec: SourceSpec) -> None:
        self._table = Path(spec.location)
        self._root = os.fsencode(self._table.parent)
        self._checks = spec.checks
        self._files = WholeFiles()

    @staticmethod
    def recognises(location: Path) -> bool:
        """A file called *.csv that lists files."""
        return location.is_file() and location.suffix.lower() == ".csv" and is_list_of_files(location)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the rows of the table, in its order; classes are numbered by name, or as their own number."""
        classes = sorted({label for _, label, _ in self._lines()})
        if not classes:
            raise SourceError(f"{self._table} lists no files; it needs lines of file,label")
        if all(_WHOLE.fullmatch(label) for label in classes):
            numbers = {label: int(label) for label in classes}
            names = class_numbers(max(numbers.values()) + 1)
        else:
            numbers = {label: number for number, label in enumerate(classes)}
            names = classes
        batch: _Batch = {}
        for count, (name, label, split) in enumerate(self._lines()):
            path = os.path.join(self._root, os.fsencode(name))  # noqa: PTH118  bytes: names need not be UTF-8
            try:
                stat = os.stat(path)  # noqa: PTH116
            except (OSError, ValueError) as error:  # ValueError: a zero byte
                why = error.strerror if isinstance(error, OSError) else error
                raise SourceError(f"{self._table}: cannot read {shown(name)}: {why}") from error
            if self._checks and count < CHECKED_AT_ONCE:
                check_magic(path, name)
            labels, entries = batch.setdefault(split, ([], []))
            labels.append(numbers[label])
            entries.append((os.fsencode(name), stat.st_size, stat.st_mtime_ns))
            if count % _BATCH == _BATCH - 1:
                self._add(index, batch)
        self._add(index, batch)
        return SourceFacts(class_names=names, samples_are="files")

    def read(self, row: Any, facts: SourceFacts, index: Index) -> memoryview:
        """The bytes of an image file."""
        path = os.path.join(self._root, index.name(int(row["place"])))  # noqa: PTH118
        return self._files.read(path, row, lambda: self.describe(row, facts, index))

    def describe(self, row: Any, facts: SourceFacts, index: Index) -> str:
        """The file as the table names it."""
        return index.name(int(row["place"])).decode("utf-8", "replace")

    def _add(self, index: IndexWriter, batch: _Batch) -> None:
        for split, (labels, entries) in batch.items():
            index.add_files(split, 0, labels, entries)
        batch.clear()

    def _lines(self) -> Iterator[tuple[str, str, str]]:
        number = 0
        with open_regular(self._table) as file:
            try:
                for number, fields in enumerate(csv.reader(text_lines(file)), 1):
                    if not fields or (number == 1 and {field.strip().lower() for field in fields[:2]} in _HEADS):
                        continue
                    yield self._line(number, fields)
            except (csv.Error, ValueError) as error:
                raise SourceError(f"{self._table} line {number + 1}: {error}") from error

    def _line(self, number: int, fields: list[str]) -> tuple[str, str, str]:
        if len(fields) not in (2, 3) or not fields[0].strip() or not fields[1].strip():
            raise SourceError(
                f"{self._table} line {number}: {len(fields)} fields; write file,label or file,label,split"
            )
        split = fields[2].strip().lower() if len(fields) == 3 else UNSPLIT
        if not _SPLIT.fullmatch(split):
            raise SourceError(
                f"{self._table} line {number}: no split is called {shown(split)}; write train, val or test"
            )
        return fields[0].strip(), fields[1].strip(), SPLIT_NAMES.get(split, split)


def is_list_of_files(path: Path) -> bool:
    """Whether a table's head is that of a list of files, or its lines have the two or three parts of one."""
    with open_regular(path) as file:
        try:
            lines = list(itertools.islice(csv.reader(text_lines(file)), 2))
        except (csv.Error, ValueError):
            return True
    if not lines or not lines[0] or {field.strip().lower() for field in lines[0][:2]} in _HEADS:
        return True
    if len(lines[0]) == 1 and any(mark in lines[0][0] for mark in ";\t"):
        return False  # a table with something else between its values
    name = lines[-1][0].strip() if lines[-1] else ""
    return len(lines[0]) in (1, 2, 3) and (_NUMBER.fullmatch(name) is None) and ("." in name or "/" in name)


def text_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of `file`, whose names need not be UTF-8; ValueError for one that is no line of names."""
    start = b"\xef\xbb\xbf"
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE:
            raise ValueError(f"it is longer than {LONGEST_LINE} bytes")
        yield line.removeprefix(start).decode("utf-8", "surrogateescape")
        start = b""
