"""Zip archives of pictures in a folder per class, divided into train, val, test folders or not."""

from __future__ import annotations

import dataclasses
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from hpcdl.core.errors import SourceError, shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.sources.arrays import FieldSource
from hpcdl.data.sources.base import MOST_SAMPLE_BYTES, SourceFacts
from hpcdl.data.sources.flat import EncodedFiles
from hpcdl.data.sources.foreign import MAGIC
from hpcdl.data.sources.index import IndexWriter
from hpcdl.data.sources.reader_samples import SPLITS

_PICTURES = (".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp")
_PICTURE_WORDS = frozenset({"image", "images", "img", "imgs", "jpegimages", "pictures"})
_MASK_WORDS = frozenset({"mask", "masks", "label", "labels", "segmentation", "segmentationclass", "annotations"})
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, ValueError, struct.error)
"""What Python raises for archives that are wrong; RuntimeError: encrypted."""


class ZipSource(FieldSource):
    """A .zip file: the pictures are unpacked into the work folder."""

    @staticmethod
    def recognises(location: Path) -> bool:
        """A .zip file with a picture in it."""
        if not location.is_file() or location.suffix.lower() != ".zip":
            return False
        try:
            with zipfile.ZipFile(location) as archive:
                return any(name.lower().endswith(_PICTURES) for name in archive.namelist())
        except _DAMAGED:
            return True  # reading it says what is wrong

    def scan(self, index: IndexWriter) -> SourceFacts:
        """Unpack the pictures, and list them with their classes."""
        if self._spec.inputs or self._spec.targets:
            raise SourceError(f"{self._location}: --input and --target are not for archives of pictures with a class")
        try:
            with zipfile.ZipFile(self._location) as archive:
                return self._listed(archive, index)
        except _DAMAGED as error:
            raise SourceError(f"{self._location} cannot be unpacked: {' '.join(str(error).split())[:200]}") from error

    def _listed(self, archive: zipfile.ZipFile, index: IndexWriter) -> SourceFacts:
        pictures, others = [], 0
        for member in archive.infolist():
            parts = PurePosixPath(member.filename).parts
            hidden = any(part.startswith(".") or part == "__MACOSX" for part in parts)  # what systems leave behind
            if member.is_dir() or hidden:
                continue
            if member.filename.lower().endswith(_PICTURES):
                pictures.append((member, parts))
            else:
                others += 1
        listed = EncodedFiles(index, self._spec)
        members: dict[str, list[tuple[zipfile.ZipInfo, str]]] = {}
        for (member, _), (split, label) in zip(pictures, self._by_folders([own for _, own in pictures]), strict=True):
            members.setdefault(split, []).append((member, label))
        for number, (split, own) in enumerate(members.items()):
            path = self._work / f"images.{number}"
            places = []
            with path.open("wb") as file:
                for member, label in own:
                    content = self._content(archive, member)
                    places.append((file.tell(), len(content), label))
                    file.write(content)
            listed.add_file(split, path, places)
        facts = listed.facts()
        if others:
            return dataclasses.replace(facts, told=[*facts.told, f"left out: {others} members that are not pictures"])
        return facts

    def _content(self, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
        if member.file_size > MOST_SAMPLE_BYTES:
            raise SourceError(
                f"{self._location}: {shown(member.filename)} has {member.file_size} bytes; no picture has"
            )
        content = archive.read(member)
        if not any(content.startswith(magic) for magic in MAGIC):
            raise SourceError(f"{self._location}: {shown(member.filename)} is not an image; repair the archive")
        return content

    def _by_folders(self, paths: Sequence[tuple[str, ...]]) -> list[tuple[str, str]]:
        """Split and class of each picture, by its folders below those that all have in common."""
        if not paths:
            raise SourceError(f"{self._location} holds no pictures ({', '.join(_PICTURES)})")
        folders = [list(own[:-1]) for own in paths]
        while all(own and own[0] == folders[0][0] for own in folders) and any(len(own) > 1 for own in folders):
            folders = [own[1:] for own in folders]
        tops = Counter(own[0] if own else "" for own in folders)
        splits = [top for top in tops if top.lower() in SPLITS]
        if splits and len(splits) < len(tops):
            odd = next(top for top in tops if top not in splits)
            raise SourceError(
                f"{self._location} holds the folders {shown(splits[0])} and {shown(odd)} side by side: splits, or "
                "classes? Put pictures into train/CLASS and test/CLASS, or rename the class"
            )
        if splits:
            found = [(SPLITS[own[0].lower()], own[1] if len(own) > 1 else "") for own in folders]
        else:
            found = [(UNSPLIT, own[0] if own else "") for own in folders]
        bare = next((path for path, (_, label) in zip(paths, found, strict=True) if not label), None)
        if bare is not None:
            raise SourceError(
                f"{self._location}: {shown('/'.join(bare))} lies in no folder of a class; put every picture into one"
            )
        words = {label.lower() for _, label in found}
        if words & _PICTURE_WORDS and words & _MASK_WORDS:
            raise SourceError(
                f"{self._location} holds pictures and masks, not classes; unpack it, and give pairs by a reader of "
                "your own (docs/how-to/own-format.md)"
            )
        return found
