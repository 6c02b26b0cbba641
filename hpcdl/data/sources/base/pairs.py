"""Two folders of image files whose names fit: images and their masks, or images and what they should become."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular, read_json
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.fields import RESERVED, is_name
from hpcdl.data.sources.base.arrays import field_name
from hpcdl.data.sources.base.folders import LeftOut, listed, not_above
from hpcdl.data.sources.base.glance import IMAGE_ENDINGS
from hpcdl.data.sources.base.images import PictureField
from hpcdl.data.sources.base.index import IndexWriter
from hpcdl.data.sources.base.source import Array, SourceChanged, SourceFacts, SourceSpec, UnreadableSample
from hpcdl.data.sources.base.splits import IGNORE, folder_splits, some

_KEPT = "images.pairs"
"""In the work folder: the target file of each pair, with its size and time."""
_OF_TARGETS = re.compile(r"[ _.-]*(?:masks?|gt|seg|segmentation|labels?|labelids|annotations?|target|truth)$", re.I)
_OF_INPUTS = re.compile(r"[ _.-]*(?:images?|img|sat|rgb|input|scan)$", re.I)
_LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif")
_Pair = tuple[Path, Path]


class PicturePairs:
    """Lists and reads pairs of files; `folders` are those that --input and --target name."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec, self._root = spec, Path(spec.location)
        self._input, self._target = PictureField(spec), PictureField(spec, mask=True)
        self._pairs: list[tuple[str, int, int]] | None = None

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the pairs of every split; SourceError where a file has no partner."""
        (inputs, name), (targets, other) = (
            self._wish(flag, own) for flag, own in (("--input", self._spec.inputs), ("--target", self._spec.targets))
        )
        if name == other:
            raise SourceError(f"{shown(name)} names an input and a target; give another name after the =")
        out = LeftOut()
        kept: list[tuple[str, int, int]] = []
        inner: list[_Pair] = []
        for split, (one, two) in self._places(inputs, targets, out).items():
            pairs = list(self._fitting(one, two, out))
            entries = []
            for first, second in pairs:
                stat = second.stat()
                index.note(stat)
                kept.append((str(second), stat.st_size, stat.st_mtime_ns))
                entries.append((os.fsencode(first.relative_to(self._root)), first.stat()))
            numbers = list(range(len(inner), len(inner) + len(pairs)))
            index.add_files(split, numbers, 0, entries)
            inner += pairs
        if not inner:
            raise SourceError(f"{self._root}: {inputs} and {targets} hold no images; there is nothing to shard")
        (Path(self._spec.work) / _KEPT).write_text(json.dumps(kept))
        fields = [
            self._input.field(name, (_content(first) for first, _ in inner)),
            self._target.field(other, (_content(second) for _, second in inner)),
        ]
        return SourceFacts(
            class_names=["all"],
            samples_are="fields",
            sample_shape=fields[0].shape,
            dtype=fields[0].dtype,
            fields=fields,
            decodes=True,
            remarks=[
                f"pairs of files in {inputs} and {targets}, by their names",
                *_remarks_on(targets, inner),
                *out.lines(),
            ],
        )

    def read_fields(self, content: Any, row: Any, facts: SourceFacts) -> Sequence[Array]:
        """The pixels of a pair; `content` is the input's file."""
        if self._pairs is None:
            self._pairs = [(name, size, stamp) for name, size, stamp in read_json(Path(self._spec.work) / _KEPT)]
        name, size, stamp = self._pairs[int(row["file"])]
        found = self._input.read(content, facts.fields[0])
        try:
            with open_regular(name) as file:
                stat = os.fstat(file.fileno())
                if (stat.st_size, stat.st_mtime_ns) != (size, stamp):
                    raise SourceChanged(
                        f"{name} changed after it was listed; shard the source anew into an empty folder"
                    )
                mask = file.read()
        except OSError as error:
            raise UnreadableSample(f"cannot read {name}: {error.strerror}") from error
        try:
            return [found, self._target.read(mask, facts.fields[1])]
        except UnreadableSample as error:
            raise UnreadableSample(f"{name}: {error}") from error

    def _wish(self, flag: str, wishes: Sequence[str]) -> tuple[str, str]:
        if len(wishes) != 1:
            raise SourceError(
                f"{self._root}: of folders of images one is the input, one the target; give --input FOLDER=NAME and "
                "--target FOLDER=NAME once each"
            )
        folder, _, name = wishes[0].rpartition("=")
        folder, name = (folder, name) if folder else (name, field_name(name))
        if not is_name(name):
            raise SourceError(
                f"{flag}: a field cannot be called {shown(name)}; write FOLDER=NAME with letters, digits and _, and "
                f"none of {', '.join(RESERVED)}"
            )
        return folder.strip("/"), name

    def _places(self, inputs: str, targets: str, out: LeftOut) -> dict[str, tuple[Path, Path]]:
        """The two folders of each split: below the splits' folders, with those below them, or as they are."""
        root, spec = self._root, self._spec
        top = listed(root, spec, out).folders
        if (root / inputs).is_dir() and (root / targets).is_dir():
            below = [listed(root / folder, spec, out).folders for folder in (inputs, targets)]
            splits = {} if spec.split_names == IGNORE else folder_splits(below[0])
            if not splits:
                return {UNSPLIT: (root / inputs, root / targets)}
            odd = {*below[0]} ^ {*below[1]} | {name for name in below[0] if name not in splits}
            if odd:
                raise SourceError(
                    f"{root}: {some(sorted(odd))} lies in one of {inputs} and {targets}, or is not called by a split; "
                    f"give --leave-out {min(odd)}, or --split-names ignore"
                )
            return {split: (root / inputs / name, root / targets / name) for name, split in splits.items()}
        splits = {} if spec.split_names == IGNORE else folder_splits(top)
        places = {split: (root / name / inputs, root / name / targets) for name, split in splits.items()}
        missing = next((one for pair in places.values() for one in pair if not one.is_dir()), None)
        if not places or missing is not None:
            raise SourceError(f"{root} has no folder {missing or inputs}; it has {some(top)}")
        return places

    def _fitting(self, one: Path, two: Path, out: LeftOut) -> Iterator[_Pair]:
        inputs, targets = self._by_stem(one, _OF_INPUTS, out), self._by_stem(two, _OF_TARGETS, out)
        alone = [
            own[stem] for own, other in ((inputs, targets), (targets, inputs)) for stem in own if stem not in other
        ]
        if alone:
            raise SourceError(
                f"{len(alone)} files of {one} and {two} have no partner of the same name, such as {alone[0]}; every "
                "input needs its target"
            )
        yield from ((inputs[stem], targets[stem]) for stem in inputs)

    def _by_stem(self, folder: Path, extra: re.Pattern[str], out: LeftOut) -> dict[str, Path]:
        """The image files below `folder` by what their names share with their partners'."""
        found: dict[str, Path] = {}
        waiting: list[tuple[Path, tuple[tuple[int, int], ...]]] = [(folder, ())]
        while waiting:
            here, above = waiting.pop()
            inside = listed(here, self._spec, out)
            seen = (*above, not_above(here, above))
            waiting += [(here / name, seen) for name in inside.folders]
            for entry in inside.entries:
                path = here / entry.name
                if path.suffix.lower() not in IMAGE_ENDINGS:
                    raise SourceError(f"{path} is not an image by its name; give --leave-out '*{path.suffix}'")
                stem = f"{here.relative_to(folder)}/{extra.sub('', path.stem) or path.stem}"
                if stem in found:
                    raise SourceError(f"{found[stem]} and {path} fit the same partner; leave one of them out")
                found[stem] = path
        return dict(sorted(found.items()))


def _remarks_on(targets: str, pairs: Sequence[_Pair]) -> list[str]:
    """That JPEG, which changes values, is no format of masks."""
    if any(second.suffix.lower() in _LOSSY for _, second in pairs):
        return [f"{targets} holds JPEG files, whose values are smeared: fit for pictures, not for masks with classes"]
    return []


def _content(path: Path) -> tuple[str, bytes]:
    with open_regular(path) as file:
        return str(path), file.read()
