"""Zip archives of images in a folder per class, optionally divided into train, val and test folders."""

from __future__ import annotations

import dataclasses
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.units import counted, format_bytes
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.base.glance import IMAGE_SUFFIXES, is_image_head
from hpcdl.data.sources.base.source import MOST_SAMPLE_BYTES, IndexWriter, SourceFacts
from hpcdl.data.sources.base.splits import AUTO, IGNORE, folder_splits, is_clutter, left_out, some, split_called, typed
from hpcdl.data.sources.layouts.arrays import FieldSource
from hpcdl.data.sources.layouts.flat import EncodedFiles
from hpcdl.data.sources.layouts.folders import ask_of_levels, ask_of_list, ask_of_parts, pictures_and_masks

_HEAD_BYTES = 12
_TABLES, _FEWEST_TABLES = (".csv", ".tsv", ".parquet"), 2
"""Endings of tables; so many of them, and no fewer than pictures, are what an archive is of."""
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError, struct.error)
"""What Python raises for damaged archives; RuntimeError: encrypted."""


class ZipSource(FieldSource):
    """A .zip file; its images are unpacked into the work folder."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """Accept a .zip file with an image in it."""
        if not location.is_file() or location.suffix.lower() != ".zip":
            return False
        try:
            with zipfile.ZipFile(location) as archive:
                return any(name.lower().endswith(IMAGE_SUFFIXES) for name in archive.namelist())
        except _DAMAGED:
            return True  # reading it reports the problem

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Unpack the images, and list them with their classes."""
        if self._spec.inputs or self._spec.targets:
            raise SourceError(f"{self._location}: --input and --target are not for archives of pictures with a class")
        try:
            with zipfile.ZipFile(self._location) as archive:
                return self._listed(archive, index)
        except _DAMAGED as error:
            raise SourceError(f"{self._location} cannot be unpacked: {' '.join(str(error).split())[:200]}") from error

    def _listed(self, archive: zipfile.ZipFile, index: IndexWriter) -> SourceFacts:
        pictures: list[tuple[zipfile.ZipInfo, tuple[str, ...]]] = []
        others: list[str] = []
        for member in archive.infolist():
            parts = PurePosixPath(member.filename).parts
            self.named.update(parts)
            if member.is_dir() or any(is_clutter(part) or left_out(part, self._spec.leave_out) for part in parts):
                continue
            if member.filename.lower().endswith(IMAGE_SUFFIXES):
                pictures.append((member, parts))
            else:
                others.append(member.filename)
        tables = [name for name in others if name.lower().endswith(_TABLES)]
        if len(tables) >= max(len(pictures), _FEWEST_TABLES):
            raise SourceError(
                f"{self._location} holds {counted(len(tables), 'table')}, such as {shown(tables[0])}, and "
                f"{counted(len(pictures), 'picture')}: tables are not read from archives; unpack it, and give the "
                "folder or one of its files. If pictures are the samples, leave the tables out: --leave-out "
                f"{' '.join(dict.fromkeys(typed('*' + PurePosixPath(name).suffix) for name in tables))}"
            )
        classes = self._by_folders([own for _, own in pictures])
        remedy = "unpack the archive and give that file as SOURCE"
        ask_of_list(str(self._location), others, {label for _, label in classes}, remedy)
        self._check_names(pictures)
        listed = EncodedFiles(index, self._spec)
        members: dict[str, list[tuple[zipfile.ZipInfo, str]]] = {}
        for (member, _), (split, label) in zip(pictures, classes, strict=True):
            members.setdefault(split, []).append((member, label))
        skipped: list[str] = []
        self.sample_names = {}
        for number, (split, own) in enumerate(members.items()):
            path = self._work / f"images.{number}"
            entries, names = [], []
            with path.open("wb") as file:
                for member, label in own:
                    content = self._whole(archive, member)
                    if content is None:
                        skipped.append(member.filename)
                        continue
                    names.append(member.filename)
                    entries.append((file.tell(), len(content), label))
                    file.write(content)
            if entries:
                listed.add_file(split, path, entries)
                self.sample_names[split] = names
        facts = dataclasses.replace(listed.facts(), skipped=skipped)
        if others:
            return dataclasses.replace(facts, remarks=[*facts.remarks, f"left out, no pictures: {some(others)}"])
        return facts

    def _check_names(self, pictures: Sequence[tuple[zipfile.ZipInfo, tuple[str, ...]]]) -> None:
        """Raise SourceError for two images of the same name: unpacking would keep only one."""
        seen: set[str] = set()
        for member, _ in pictures:
            if member.filename in seen:
                raise SourceError(
                    f"{self._location}: two pictures are called {shown(member.filename)}, of which unpacking keeps the "
                    "last: unpack the archive, and shard the folder"
                )
            seen.add(member.filename)

    def _whole(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes | None:
        """Return the content of a member; None if it is damaged and --on-error is skip."""
        try:
            return self._content(archive, member)
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            if not self._spec.checks:
                return None
            raise SourceError(
                f"{self._location}: {shown(member.filename)} cannot be unpacked: {' '.join(str(error).split())[:200]}; "
                "fetch the archive again, or give --on-error skip"
            ) from error

    def _content(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        if member.file_size > MOST_SAMPLE_BYTES:
            raise SourceError(
                f"{self._location}: {shown(member.filename)} has {format_bytes(member.file_size)}, and a picture "
                f"has at most {format_bytes(MOST_SAMPLE_BYTES)}; unpack the archive, and leave that one out"
            )
        with archive.open(member) as file:  # check the head first: a file that is no image may unpack to a huge size
            head = file.read(_HEAD_BYTES)
            if not is_image_head(head):
                raise SourceError(f"{self._location}: {shown(member.filename)} is not an image; repair the archive")
            return head + file.read()

    def _by_folders(self, paths: Sequence[tuple[str, ...]]) -> list[tuple[str, str]]:
        """Return split and class of each image, by its folders below those that all images share."""
        if not paths:
            raise SourceError(f"{self._location} holds no pictures ({', '.join(IMAGE_SUFFIXES)})")
        folders = [list(parts[:-1]) for parts in paths]
        while all(parts and parts[0] == folders[0][0] for parts in folders) and any(
            len(parts) > 1 for parts in folders
        ):
            # The last shared folder stays: it may be the only class.
            folders = [parts[1:] for parts in folders]
        tops = list(dict.fromkeys(parts[0] for parts in folders if parts))
        splits = {} if self._spec.split_names == IGNORE else folder_splits(tops)
        odd = next((top for top in tops if top not in splits), None)
        if splits and odd is not None and self._spec.split_names == AUTO:
            raise SourceError(
                f"{self._location} holds the folders {shown(next(iter(splits)))} and {shown(odd)} side by side: "
                f"splits, or classes? Give --leave-out {typed(odd)}, or --split-names keep (a split of its own), or "
                "--split-names ignore (all are classes)"
            )
        if not splits:
            ask_of_parts(str(self._location), tops, self._spec)
        result, below = [], []
        for path, parts in zip(paths, folders, strict=True):
            split, classes = (
                (splits.get(parts[0], parts[0].lower()), parts[1:]) if splits and parts else (UNSPLIT, parts)
            )
            if not classes:
                raise SourceError(
                    f"{self._location}: {shown('/'.join(path))} is in no folder of a class; put each into one"
                )
            if self._spec.split_names == AUTO and (word := next(filter(split_called, classes[1:]), None)):
                raise SourceError(
                    f"{self._location}: {shown(word)} is named after a split, and is in the class {shown(classes[0])}; "
                    "put splits above classes, or give --split-names ignore (a part of the class)"
                )
            result.append((split, classes[0]))
            below.append(classes[1] if len(classes) > 1 else "")
        if all(below):
            ask_of_levels(str(self._location), sorted({name for _, name in result}), sorted({*below}), self._spec)
        if self._spec.target_kind != "class" and pictures_and_masks([label for _, label in result]):
            raise SourceError(
                f"{self._location} holds pictures and masks, not classes; unpack it and shard the folder, or give "
                "--target-kind class"
            )
        return result
