"""Text samples: lines or files; the class is that of the file or folder, or the same line of a label file."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular
from hpcdl.core.units import counted
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.glance import files_of, folders_of, has_folders_of_images
from hpcdl.data.sources.base.labels import spellings
from hpcdl.data.sources.base.placed import ArrayGroup, FoundArray, PlacedArray
from hpcdl.data.sources.base.source import MOST_SAMPLE_BYTES, IndexWriter, SourceFacts
from hpcdl.data.sources.base.splits import by_names, folder_splits, is_clutter, left_out, some, typed
from hpcdl.data.sources.layouts.arrays import FieldSource

_SUFFIX = ".txt"
_LABELS = ("{stem}.labels.txt", "{stem}_labels.txt", "{stem}.labels", "labels.txt")
"""Usual names of the label file for the lines of STEM.txt."""
_BESIDE = re.compile(r"(?:readme|license|licence|copying|citation|notice)(?![a-z]).*", re.IGNORECASE)
# IMDB's reviews have such a folder (train/unsup) beside those of the classes.
_UNLABELLED = re.compile(r"unsup|unsupervised|unlabel+ed", re.IGNORECASE)
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_NUMBERS = re.compile(rb"[0-9.eE+\-\s,;]*[0-9][0-9.eE+\-\s,;]*")
_DRAWN, _BEGINNING = 1000, 4096
"""Texts of a split that are looked at, and bytes of each."""
_Samples = tuple[list[bytes], list[bytes]]
"""Texts and labels."""


class TextSource(FieldSource):
    """A file of lines with a label file, CLASS.txt files of lines, or a folder of files per class."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a .txt file, or a folder with only such files."""
        if location.is_file():
            return location.suffix.lower() == _SUFFIX
        if _only_texts(location):
            return True
        below = _content(location, folders_of)
        splits = folder_splits([folder.name for folder in below])
        roots = [folder for folder in below if folder.name in splits]
        if roots and all(map(_only_texts, roots)):
            return True
        classes = [folder for root in roots or [location] for folder in _content(root, folders_of)]
        filled = next((folder for folder in classes if _content(folder, files_of)), None)
        return filled is not None and _only_texts(filled)

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Read texts and labels, split by split."""
        roots = self._roots()
        samples: dict[str, _Samples] = {}
        for split, root in roots.items():
            for name, (texts, labels) in self._samples(split, root).items():
                entry = samples.setdefault(name, ([], []))
                entry[0].extend(texts)
                entry[1].extend(labels)
        self._ask_of_numbers([text for texts, _ in samples.values() for text in texts[:: len(texts) // _DRAWN + 1]])
        # latin-1 decodes any bytes; labels that are not UTF-8 are refused later, with their place.
        different = {label.decode("latin-1") for _, labels in samples.values() for label in labels}
        whole = all(map(_WHOLE.fullmatch, different))
        written = spellings(different, self._spec.target_kind, str(self._location)) if whole else None
        parts = []
        for split, (texts, labels) in samples.items():
            placed = self._placing(labels, "label")
            if written is not None:
                placed = functools.partial(self._numbers, labels, written)
            arrays = {"text": FoundArray("text", self._placing(texts, "text")), "label": FoundArray("label", placed)}
            parts.append(ArrayGroup(split=split, arrays=arrays))
        facts = self.list_parts(parts, index)
        empty = sum(not text.strip() for texts, _ in samples.values() for text in texts)
        notes = [f"{counted(empty, 'text')} hold nothing (an empty line or file), and are samples too"] if empty else []
        beside = [entry.name for root in roots.values() if root.is_dir()
                  for entry in [*files_of(root), *folders_of(root)] if _BESIDE.fullmatch(entry.name)]  # fmt: skip
        notes += [f"left out, as what authors put beside data: {some(beside)}"] if beside else []
        return dataclasses.replace(facts, remarks=[*facts.remarks, *notes])

    def _ask_of_numbers(self, texts: Sequence[bytes]) -> None:
        """Raise SourceError if most texts consist of numbers, as series and arrays saved as text do."""
        made = [text for text in texts if _NUMBERS.fullmatch(text[:_BEGINNING])]
        if 2 * len(made) <= len(texts) or self._spec.target_kind == "class" or not self._spec.asks:
            return
        raise SourceError(
            f"{self._location}: its texts are numbers, such as {shown(made[0][:40].decode())}: series or arrays? Save "
            "them as arrays (numpy.loadtxt, and numpy.savez for all), or give --target-kind class for texts of digits"
        )

    def _roots(self) -> dict[str, Path]:
        """Return the folder of each split; SourceError if only some folders are named after a split."""
        if self._location.is_file() or self._spec.split_names == "ignore":
            return {UNSPLIT: self._location}
        folders = _content(self._location, folders_of)
        folders = [folder for folder in folders if not left_out(folder.name, self._spec.leave_out)]
        splits = folder_splits([folder.name for folder in folders])
        others = [folder.name for folder in folders if folder.name not in splits]
        twice = [name for name in splits if list(splits.values()).count(splits[name]) > 1]
        if splits and (others or twice):
            raise SourceError(
                f"{self._location}: {some(splits)} are called by splits, {some(others or twice)} "
                f"{'not' if others else 'by the same one'}: a split or a class? Give --leave-out "
                f"{typed((others or twice)[0])}, or --split-names ignore (all of these folders are classes)"
            )
        return {splits[folder.name]: folder for folder in folders if splits} or {UNSPLIT: self._location}

    def _placing(self, values: Sequence[bytes], name: str) -> Callable[[], PlacedArray]:
        return functools.partial(self.placed_text, values, name)

    def _numbers(self, labels: Sequence[bytes], written: Mapping[int, str]) -> PlacedArray:
        placed = self.placed(np.array([int(label) for label in labels], np.int64))
        return dataclasses.replace(placed, called=written)

    def _samples(self, split: str, root: Path) -> dict[str, _Samples]:
        """Return the samples of a file or folder by split; files called train* and test* also make splits."""
        if root.is_file():
            return {split: self._beside(root)}
        files = _texts(root)
        folders = [folder for folder in _content(root, folders_of) if _texts(folder)]
        folders = [folder for folder in folders if not left_out(folder.name, self._spec.leave_out)]
        unlabelled = next((folder.name for folder in folders if _UNLABELLED.fullmatch(folder.name)), None)
        if unlabelled is not None and self._spec.target_kind != "class":
            raise SourceError(
                f"{root / unlabelled}: texts without a class, or a class called so? Give --leave-out "
                f"{typed(unlabelled)}, or --target-kind class"
            )
        if folders:
            return {split: _by_class({folder.name: map(_whole, _texts(folder)) for folder in folders})}
        lines = [path for path in files if not re.search(r"(?:^|[._])labels$", path.stem)]
        if split == UNSPLIT and len(lines) > 1:
            divided = by_names(lines, self._spec)
            several = next((paths for paths in divided.values() if len(paths) > 1), None)
            if len(divided) > 1 and several is None:
                return {name: self._beside(paths[0]) for name, paths in divided.items()}
            if len(divided) > 1 and several is not None:
                raise SourceError(
                    f"{root}: {some(path.name for path in several)} are of one split; put each split's CLASS.txt files "
                    "into a folder train, val or test, or give --split-names ignore (each file is a class)"
                )
            lines = divided[UNSPLIT]
        if len(lines) == 1:
            return {split: self._beside(lines[0])}
        if not lines:
            raise SourceError(f"{root} holds no {_SUFFIX} files; it needs CLASS.txt files, or a folder for each class")
        self._ask_of_numbered(root, lines)
        return {split: _by_class({path.stem: _lines(path) for path in lines})}

    def _ask_of_numbered(self, root: Path, files: Sequence[Path]) -> None:
        """Raise SourceError for files that numbers alone distinguish: each a class, or a text?"""
        alike = {re.sub(r"[0-9]+", "", path.stem).strip("_-. ").lower() for path in files}
        if (
            not self._spec.asks
            or self._spec.target_kind == "class"
            or len(alike) > 1
            or alike & {"class", "label", "category"}
        ):
            return
        raise SourceError(
            f"{root}: is each of its {len(files)} files a class whose lines are samples, or one text? Numbers alone "
            f"distinguish them ({some(path.name for path in files)}). Give --target-kind class for classes; texts need "
            "a folder for each class"
        )

    def _beside(self, path: Path) -> _Samples:
        """Return the lines of a file, and their labels from the label file beside it."""
        named = self._spec.label_field
        names = [named] if named else [name.format(stem=path.stem) for name in _LABELS]
        beside = next((path.parent / name for name in names if (path.parent / name).is_file()), None)
        if beside is None and not named and self._spec.target_kind == "class":
            return _by_class({path.stem: _lines(path)})
        if beside is None:
            raise SourceError(
                f"{path}: where are the labels of its lines? {' and '.join(names[:2])} {'is' if named else 'are'} not "
                "beside it; give --label-field FILE with a label a line, or a file CLASS.txt for each class. Without "
                "labels, for hpcdl infer, give --target-kind class (all are one class). For a table with tabs, commas "
                "or semicolons give --format table"
            )
        texts, labels = _lines(path), _lines(beside)
        if len(texts) != len(labels):
            raise SourceError(
                f"{path} has {len(texts)} lines and {beside.name} {len(labels)}; every line needs one label"
            )
        empty = next((number for number, label in enumerate(labels, 1) if not label), None)
        if empty is not None:
            raise SourceError(f"{beside} line {empty} is empty; every line needs one label")
        return texts, labels


def _by_class(texts: Mapping[str, Iterable[bytes]]) -> _Samples:
    result: _Samples = ([], [])
    for name, samples in texts.items():
        contents = list(samples)
        result[0].extend(contents)
        result[1].extend([name.encode("utf-8", "surrogateescape")] * len(contents))
    return result


def _whole(path: Path) -> bytes:
    with open_regular(path) as file:
        content = file.read(MOST_SAMPLE_BYTES + 1)
    if len(content) > MOST_SAMPLE_BYTES:
        raise SourceError(f"{path} has over {MOST_SAMPLE_BYTES} bytes, too many for one sample")
    return _text(path, content)


def _text(path: Path, content: bytes) -> bytes:
    if b"\0" in content and not content.startswith((b"\xff\xfe", b"\xfe\xff")):  # UTF-16 marks: reported later
        raise SourceError(f"{path} holds zero bytes: no text in UTF-8, but in UTF-16? Save it as UTF-8")
    return content.removeprefix(b"\xef\xbb\xbf")


def _lines(path: Path) -> list[bytes]:
    with open_regular(path) as file:
        content = _text(path, file.read())
    lines = content.split(b"\n" if b"\n" in content else b"\r")  # a lone CR: old Macs, and Excel on macOS
    if lines and not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r") for line in lines]


def _content(folder: Path, kind: Callable[[Path], list[Path]]) -> list[Path]:
    """Return the files or folders (by `kind`) of a folder, without clutter and without files such as README."""
    return [path for path in kind(folder) if not is_clutter(path.name) and not _BESIDE.fullmatch(path.name)]


def _texts(folder: Path) -> list[Path]:
    return [path for path in _content(folder, files_of) if path.suffix.lower() == _SUFFIX]


def _only_texts(folder: Path) -> bool:
    texts = _texts(folder)
    return bool(texts) and texts == _content(folder, files_of) and not has_folders_of_images(folder)
