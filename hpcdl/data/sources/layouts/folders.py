"""Interpret the folders of image files as splits, classes, masks or pairs; ask the user if that is ambiguous."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from hpcdl.core.errors import SourceError, shown
from hpcdl.core.storage.files import open_regular, read_json
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import RESERVED, Field, is_name
from hpcdl.data.sources.base.chosen import field_name
from hpcdl.data.sources.base.glance import IMAGE_SUFFIXES
from hpcdl.data.sources.base.source import Array, IndexWriter, SourceChanged, SourceFacts, SourceSpec, UnreadableSample
from hpcdl.data.sources.base.splits import (
    AUTO,
    IGNORE,
    doubled_splits,
    folder_splits,
    is_clutter,
    left_out,
    some,
    split_called,
    typed,
)
from hpcdl.data.sources.base.values import LOOKED_AT
from hpcdl.data.sources.checks.pictures import Palettes, colours_as_classes, is_other_aspect, mask_with_gaps
from hpcdl.data.sources.layouts.images import PictureField, colours_used, decode_mask, image_head

_PICTURES = re.compile(r"(?:jpeg|png)?(?:images?|imgs?|photos?|pictures?|frames?)|inputs?|rgb|scans?|raws?")
_MASKS = re.compile(
    r"(?:semantic|instance|binary|image)?(?:masks?|labels?|annotations?|annots?|segmentations?|segmentationclass"
    r"|segmentationobject|trimaps?)|outputs?|gts?|groundtruths?|targets?|depths?|mattes?|edges?|contours?"
)
_PAIRED = (
    frozenset(itertools.product(("lr", "lowres", "low", "lq"), ("hr", "highres", "high", "hq")))
    | frozenset(itertools.product(("noisy", "blur", "blurred", "blurry", "degraded"), ("clean", "sharp", "denoised")))
    | {("source", "target"), ("before", "after")}
)
"""Names of two folders that hold pairs of pictures, if the files in them have the same names."""
_PART = re.compile(r"(?:cv|k)?(?:fold|part|subset|partition|batch|chunk)s?[\W_]*[0-9]+", re.IGNORECASE)
_LOOKED_INTO = 64
_LISTS = (".csv", ".tsv", ".json", ".xml", ".txt", ".mat")
"""Endings of files that may list the labels of images."""
FoundFile = tuple[str, "os.DirEntry[str]"]
"""The name of a file below its class folder, and its directory entry, which caches the state of links."""


@dataclass(frozen=True, kw_only=True)
class ClassFolder:
    """A folder whose files are of one class; `path` is below the source."""

    split: str
    name: str
    path: str


@dataclass(kw_only=True)
class LeftOut:
    """Folders and files that are left out, shown to the user: names of folders, number and first names of files."""

    folders: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    num_files: int = 0

    def add_file(self, name: str) -> None:
        """Count a file."""
        self.num_files += 1
        if len(self.files) < _LOOKED_INTO:
            self.files.append(name)

    def lines(self) -> list[str]:
        """Return the lines for the plan and the manifest."""
        remarks = [f"left out: the folders {some(self.folders)}"] if self.folders else []
        if self.num_files:
            remarks.append(f"left out: {self.num_files} files, such as {some(self.files[:3])}")
        return remarks


def ask_of_list(where: str, others: Sequence[str], classes: Collection[str], remedy: str) -> None:
    """Raise SourceError if all images are of one class and a list beside them (among `others`) may hold labels."""
    list_name = next((name for name in others if name.lower().endswith(_LISTS)), None)
    if list_name is not None and len(classes) == 1:
        raise SourceError(
            f"{where}: all pictures are in one folder, {shown(min(classes))}, and {shown(list_name)} may list their "
            f"labels: {remedy}, or give --leave-out {typed(PurePosixPath(list_name).name)} for one class"
        )


def ask_of_levels(where: str, names: Sequence[str], below: Collection[str], spec: SourceSpec) -> None:
    """Raise SourceError if the folders `names` hold images only in the folders `below`: either may be the classes."""
    if len(below) > 1 and spec.target_kind != "class" and spec.split_names == AUTO:
        raise SourceError(
            f"{where}: {some(names)} hold no pictures but the folders {some(below)}: which are the classes? Give "
            f"--target-kind class for {some(names)}; for those below list files and labels in a .csv"
        )


@dataclass(frozen=True, kw_only=True)
class _Content:
    """The content of a folder, sorted by name; `entries` are its files."""

    folders: Sequence[str]
    entries: Sequence[os.DirEntry[str]]


def class_folders(root: Path, spec: SourceSpec, out: LeftOut) -> list[ClassFolder]:
    """Return the class folders of every split; SourceError if names are ambiguous or no folder is left."""
    top = listed(root, spec, out)
    for entry in top.entries:
        out.add_file(entry.name)
    if not top.folders:
        raise SourceError(f"{root} holds no class folders; put each class's images into a folder of its own")
    splits = {} if spec.split_names == IGNORE else folder_splits(top.folders)
    if not splits:
        _ask_of_masks(root, top.folders, spec)
        ask_of_parts(str(root), top.folders, spec)
        if len(top.folders) == 1 and spec.target_kind != "class":
            _ask_of_one(root, top.folders[0], spec)
        return [ClassFolder(split=UNSPLIT, name=name, path=name) for name in top.folders]
    within = {name: listed(root / name, spec, out) for name in top.folders}
    _ask_of_splits(root, splits, within, spec)
    folders = []
    for name, inside in within.items():
        # --split-names keep makes a split of any other folder, by its own name.
        split = splits.get(name) or re.sub(r"\W+", "-", name).strip("-").lower()
        _ask_of_masks(root / name, inside.folders, spec)
        for entry in inside.entries:
            out.add_file(f"{name}/{entry.name}")
        folders += [
            ClassFolder(split=split, name=class_name, path=f"{name}/{class_name}") for class_name in inside.folders
        ]
    return folders


def listed(folder: Path, spec: SourceSpec, out: LeftOut) -> _Content:
    """Return a folder's folders and files, sorted; clutter and names to leave out are recorded in `out`."""
    folders: list[str] = []
    files: list[os.DirEntry[str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in (".zarray", ".zgroup", "zarr.json"):
                raise SourceError(
                    f"{folder} is zarr, which is not built in; give a reader of your own: --reader FILE.py:NAME"
                )
            clutter = is_clutter(entry.name) or left_out(entry.name, spec.leave_out)
            if entry.is_dir():
                if not clutter:
                    _check_is_source(entry, spec)
                (out.folders if clutter else folders).append(entry.name)
            elif clutter:
                out.add_file(entry.name)
            else:
                files.append(entry)
    files.sort(key=lambda entry: os.fsencode(entry.name))
    return _Content(folders=sorted(folders, key=os.fsencode), entries=files)


def _check_is_source(folder: os.DirEntry[str], spec: SourceSpec) -> None:
    """Raise SourceError for the folder that the shards are written to, which would be a class without samples."""
    target = Path(spec.work).parent
    if spec.work and target.exists() and os.path.samestat(folder.stat(), target.stat()):
        raise inside_source(folder.path)


def inside_source(target: str) -> SourceError:
    """Return the error for a target that is a folder of the source."""
    return SourceError(f"{target}, the folder to write to, is inside the source; name a folder outside it")


def not_above(folder: Path, above: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return device and inode of a folder; SourceError if it is a link to one of the folders `above` it."""
    status = folder.stat()
    if (status.st_dev, status.st_ino) in above:
        link = next((path for path in (folder, *folder.parents) if path.is_symlink()), folder)
        raise SourceError(
            f"{link} is a link to a folder above it; take it away, or give --leave-out {typed(link.name)}"
        )
    return status.st_dev, status.st_ino


def _ask_of_splits(root: Path, splits: dict[str, str], within: dict[str, _Content], spec: SourceSpec) -> None:
    """Raise SourceError unless every folder is a split with class folders, and each has a different split."""
    flat = [name for name in splits if not within[name].folders]
    others = [name for name in within if name not in splits]
    if len(flat) == len(splits):
        _ask_of_flat(root, flat, others)
    if flat:
        count = len(within[flat[0]].entries)
        raise SourceError(
            f"{root}: {shown(flat[0])} is named after a split, and holds {count} files without class folders: their "
            f"classes are not known. Give --leave-out {','.join(map(typed, flat))} to take the other splits alone, put "
            "each class's images into a folder of its own, or list files and labels in a .csv"
        )
    alone = [name for name in splits if _holds_one_alone(name, within)]
    if alone and spec.target_kind != "class":
        raise SourceError(
            f"{root}: {shown(alone[0])} holds the folder {shown(within[alone[0]].folders[0])} alone, which is no class "
            f"of the other splits: are its classes known? If not, give --leave-out {','.join(map(typed, alone))} to "
            "take the other splits alone, or list files and labels in a .csv. If that is a class, give --target-kind "
            "class"
        )
    twice = next(((a, b) for a in splits for b in splits if a < b and splits[a] == splits[b]), None)
    if twice and spec.split_names == AUTO:
        raise SourceError(
            f"{root}: {shown(twice[0])} and {shown(twice[1])} both say {splits[twice[0]]}; give --leave-out with one "
            "of them, or --split-names keep to put both into that split"
        )
    if not others:
        return
    if spec.split_names == AUTO:
        raise SourceError(
            f"{root}: {some(splits)} are called by splits, {some(others)} {'is' if len(others) == 1 else 'are'} not: a "
            f"split or a class? Give --leave-out {typed(others[0])}, or --split-names keep (a split of its own), or "
            "--split-names ignore (all of these folders are classes)"
        )
    empty = next((name for name in others if not within[name].folders), None)
    if empty:
        raise SourceError(f"{root}: {shown(empty)} holds no class folders; give --leave-out {typed(empty)}")


def _holds_one_alone(name: str, within: dict[str, _Content]) -> bool:
    """Return whether a split's one folder, such as val/images, is in no other split, of which one has several."""
    own = within[name].folders
    others = [content.folders for other, content in within.items() if other != name]
    return (
        len(own) == 1
        and any(len(folders) > 1 for folders in others)
        and all(own[0] not in f for f in others if len(f) > 1)
    )


def _ask_of_flat(root: Path, flat: Sequence[str], others: Sequence[str]) -> None:
    beside = f" beside {some(others)}" if others else ""
    raise SourceError(
        f"{root}: {some(flat)}{beside}: a split or a class? Folders of splits need a folder for each class inside (or "
        "a .csv of file,label,split). Give --split-names ignore to take them for classes, or --leave-out "
        f"{typed(flat[0])}"
    )


def _ask_of_masks(root: Path, names: Sequence[str], spec: SourceSpec) -> None:
    """Raise SourceError if folders have names of images and of their masks."""
    if spec.target_kind == "class":
        return
    _ask_of_pairs(root, names, spec)
    pair = pictures_and_masks(names)
    if pair is not None and not _holds_boxes(root / pair[1], spec):
        raise SourceError(
            f"{root}: {shown(pair[0])} and {shown(pair[1])}: images and their masks, or two classes? Give --input "
            f"{typed(pair[0] + '=image')} --target {typed(pair[1] + '=mask')}, or --target-kind class (folders are "
            f"classes), or --leave-out {typed(pair[1])}"
        )


def _holds_boxes(folder: Path, spec: SourceSpec) -> bool:
    """Return whether a folder holds texts alone, such as boxes in XML, of which files that are no images are told."""
    names = _files_in(folder, spec)
    return bool(names) and all(name.lower().endswith((".xml", ".json", ".txt", ".csv")) for name in names)


def ask_of_parts(where: str, names: Sequence[str], spec: SourceSpec) -> None:
    """Raise SourceError if folders are named like parts of a data set, such as fold1, fold2, or trainA beside testA."""
    parts = names if len(names) > 1 and all(map(_PART.fullmatch, names)) else doubled_splits(names)
    if parts and spec.target_kind != "class" and spec.split_names != IGNORE:
        raise SourceError(
            f"{where}: {some(parts)}: parts of a data set, or classes? Give --target-kind class for classes; for parts "
            "list files and labels in a .csv of file,label,split"
        )


def _ask_of_pairs(root: Path, names: Sequence[str], spec: SourceSpec) -> None:
    """Raise SourceError for two folders called like pairs of pictures (LR and HR) with files of the same names."""
    for first, second in itertools.permutations(names, 2) if len(names) == 2 else ():
        called = (_plain(first), _plain(second))
        # Names alone are no reason to ask: before and after may well be two classes.
        if called in _PAIRED and _files_in(root / first, spec) == _files_in(root / second, spec):
            raise SourceError(
                f"{root}: {shown(first)} and {shown(second)} hold files of the same names: pairs of images, or two "
                f"classes? Give --input {typed(first + '=input')} --target {typed(second + '=target')}, or "
                "--target-kind class"
            )


def _plain(name: str) -> str:
    return re.sub(r"[\W_0-9]+", "", name).lower()


def _files_in(folder: Path, spec: SourceSpec) -> set[str]:
    return {entry.name for entry in listed(folder, spec, LeftOut()).entries}


def pictures_and_masks(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the folders whose names mean images and masks, if both exist."""
    plain = {name: _plain(name) for name in names}
    pictures = [name for name, word in plain.items() if _PICTURES.fullmatch(word)]
    masks = [name for name, word in plain.items() if _MASKS.fullmatch(word)]
    return (pictures[0], masks[0]) if pictures and masks else None


def _ask_of_one(root: Path, name: str, spec: SourceSpec) -> None:
    """Raise SourceError for a single folder with folders and no files: classes or splits are one level below."""
    inside = listed(root / name, spec, LeftOut())
    if len(inside.folders) > 1 and not inside.entries:
        raise SourceError(
            f"{root} holds one folder, {shown(name)}, and that holds {some(inside.folders)}: are these the classes or "
            f"splits? Then give {root / name}; for one class called {shown(name)} give --target-kind class"
        )


class FolderWalk:
    """The files of a class folder, folder by folder; everything left out is recorded in `out`."""

    def __init__(self, root: Path, spec: SourceSpec, out: LeftOut) -> None:
        self._root, self._spec, self._out = root, spec, out
        self._own, self._below = False, dict[str, None]()

    def files(self, chosen: ClassFolder) -> list[tuple[str, list[FoundFile]]]:
        """Return the files below the class folder, by split."""
        by_split: dict[str, list[FoundFile]] = {}
        self._walk(chosen, "", chosen.split, by_split, ())
        return list(by_split.items())

    def ask_of_levels(self, names: Sequence[str]) -> None:
        """Raise SourceError if the class folders `names` hold only folders: the classes may be one level below."""
        ask_of_levels(str(self._root), names, [] if self._own else list(self._below), self._spec)

    def _walk(
        self,
        chosen: ClassFolder,
        below: str,
        split: str,
        files: dict[str, list[FoundFile]],
        above: tuple[tuple[int, int], ...],
    ) -> None:
        folder = self._root / chosen.path / below
        # By device and inode, because a link to a folder above has another path at each level.
        seen = (*above, not_above(folder, above))
        inside = listed(folder, self._spec, self._out)
        if not below:
            self._own = self._own or bool(inside.entries)
            self._below.update(dict.fromkeys(inside.folders))
        prefix = f"{below}/" if below else ""
        files.setdefault(split, []).extend((prefix + entry.name, entry) for entry in inside.entries)
        _ask_of_masks(folder, inside.folders, self._spec)
        for name in inside.folders:
            inner_split = self._split_of(chosen, folder / name, split)
            self._walk(chosen, prefix + name, inner_split, files, seen)

    def _split_of(self, chosen: ClassFolder, folder: Path, split: str) -> str:
        """Return the split of a folder within a class: the class's, unless the folder is named after a split."""
        word = split_called(folder.name)
        if word is None or self._spec.split_names == IGNORE:
            return split
        if self._spec.split_names == AUTO or split not in (UNSPLIT, word):
            raise SourceError(
                f"{folder} is named after a split, and is in the class {shown(chosen.name)}: give --split-names keep "
                f"for a split, --split-names ignore for a part of the class, or --leave-out {typed(folder.name)}"
            )
        return word


_KEPT = "images.pairs"
"""In the work folder: the target file of each pair, with its size and time."""
_OF_TARGETS = re.compile(r"[ _.-]*(?:masks?|gt|seg|segmentation|labels?|labelids|annotations?|target|truth)$", re.I)
_OF_INPUTS = re.compile(r"[ _.-]*(?:images?|img|sat|rgb|input|scan)$", re.I)
_LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif")
_Pair = tuple[Path, Path]


class PicturePairs:
    """Lists and reads pairs of files from the folders that --input and --target name."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec, self._root = spec, Path(spec.location)
        self._input, self._target = PictureField(spec), PictureField(spec, mask=True)
        self._pairs: list[tuple[str, int, int]] | None = None

    def scan(self, index: IndexWriter) -> SourceFacts:
        """List the pairs of every split; SourceError if a file has no partner."""
        (inputs, input_name), (targets, target_name) = (
            self._flag_value(flag, flag_values)
            for flag, flag_values in (("--input", self._spec.inputs), ("--target", self._spec.targets))
        )
        if input_name == target_name:
            raise SourceError(f"{shown(input_name)} names an input and a target; give another name after the =")
        out = LeftOut()
        kept: list[tuple[str, int, int]] = []
        all_pairs: list[_Pair] = []
        for split, (input_folder, target_folder) in self._folder_pairs(inputs, targets, out).items():
            pairs = list(self._fitting(input_folder, target_folder, out))
            entries = []
            for first, second in pairs:
                stat = second.stat()
                # Targets have no rows of their own, and a change in them is a change of the source too.
                index.note(stat)
                kept.append((str(second), stat.st_size, stat.st_mtime_ns))
                entries.append((os.fsencode(first.relative_to(self._root)), first.stat()))
            numbers = list(range(len(all_pairs), len(all_pairs) + len(pairs)))
            index.add_files(split, numbers, 0, entries)
            all_pairs += pairs
        if not all_pairs:
            raise SourceError(f"{self._root}: {inputs} and {targets} hold no images; there is nothing to shard")
        # Other writing processes read it: rows hold the input's state alone.
        (Path(self._spec.work) / _KEPT).write_text(json.dumps(kept))
        fields = [
            self._input.field(input_name, (_content(first) for first, _ in all_pairs)),
            self._target.field(target_name, (_content(second) for _, second in all_pairs)),
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
                *_remarks_on(targets, all_pairs),
                *_unfit(all_pairs, crops=self._spec.image_size is not None),
                *_odd_masks(fields[1], [second for _, second in all_pairs]),
                *_other_palettes(fields[1].name, [second for _, second in all_pairs]),
                *out.lines(),
            ],
        )

    def read_fields(self, content: Any, row: Any, facts: SourceFacts) -> Sequence[Array]:
        """Return the pixels of a pair; `content` is the input's file."""
        if self._pairs is None:
            self._pairs = [(name, size, stamp) for name, size, stamp in read_json(Path(self._spec.work) / _KEPT)]
        name, size, stamp = self._pairs[int(row["file"])]
        pixels = self._input.read(content, facts.fields[0])
        try:
            with open_regular(name) as file:
                stat = os.fstat(file.fileno())
                if (stat.st_size, stat.st_mtime_ns) != (size, stamp):
                    raise SourceChanged(
                        f"{name} changed after it was listed; shard the source again into an empty folder"
                    )
                mask = file.read()
        except OSError as error:
            raise UnreadableSample(f"cannot read {name}: {error.strerror}") from error
        try:
            return [pixels, self._target.read(mask, facts.fields[1])]
        except UnreadableSample as error:
            raise UnreadableSample(f"{name}: {error}") from error

    def _flag_value(self, flag: str, flag_values: Sequence[str]) -> tuple[str, str]:
        if len(flag_values) != 1:
            raise SourceError(
                f"{self._root}: of folders of images one is the input, one the target; give --input FOLDER=NAME and "
                "--target FOLDER=NAME once each"
            )
        folder, _, name = flag_values[0].rpartition("=")
        folder, name = (folder, name) if folder else (name, field_name(name))
        if not is_name(name):
            raise SourceError(
                f"{flag}: a field cannot be called {shown(name)}; write FOLDER=NAME with letters, digits and _, and "
                f"none of {', '.join(RESERVED)}"
            )
        return folder.strip("/"), name

    def _folder_pairs(self, inputs: str, targets: str, out: LeftOut) -> dict[str, tuple[Path, Path]]:
        """Return the two folders of each split: inside the split folders, with split folders inside, or undivided."""
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
                    f"{root}: {some(sorted(odd))} is in only one of {inputs} and {targets}, or is not named after a "
                    f"split; give --leave-out {typed(min(odd))}, or --split-names ignore"
                )
            return {split: (root / inputs / name, root / targets / name) for name, split in splits.items()}
        splits = {} if spec.split_names == IGNORE else folder_splits(top)
        folder_pairs = {split: (root / name / inputs, root / name / targets) for name, split in splits.items()}
        missing = next((path for pair in folder_pairs.values() for path in pair if not path.is_dir()), None)
        if not folder_pairs or missing is not None:
            raise SourceError(f"{root} has no folder {missing or inputs}; it has {some(top)}")
        return folder_pairs

    def _fitting(self, one: Path, two: Path, out: LeftOut) -> Iterator[_Pair]:
        inputs, targets = self._by_stem(one, _OF_INPUTS, out), self._by_stem(two, _OF_TARGETS, out)
        alone = [
            files[stem]
            for files, partners in ((inputs, targets), (targets, inputs))
            for stem in files
            if stem not in partners
        ]
        if alone:
            raise SourceError(
                f"{len(alone)} files of {one} and {two} have no partner of the same name, such as {alone[0]}; every "
                "input needs its target"
            )
        yield from ((inputs[stem], targets[stem]) for stem in inputs)

    def _by_stem(self, folder: Path, extra: re.Pattern[str], out: LeftOut) -> dict[str, Path]:
        """Return the image files below `folder`, by the part of the name that partners share."""
        files: dict[str, Path] = {}
        waiting: list[tuple[Path, tuple[tuple[int, int], ...]]] = [(folder, ())]
        while waiting:
            here, above = waiting.pop()
            inside = listed(here, self._spec, out)
            seen = (*above, not_above(here, above))
            waiting += [(here / name, seen) for name in inside.folders]
            for entry in inside.entries:
                path = here / entry.name
                if path.suffix.lower() not in IMAGE_SUFFIXES:
                    raise SourceError(f"{path} is not an image by its name; give --leave-out '*{path.suffix}'")
                # A file may be called mask.png and no more.
                stem = f"{here.relative_to(folder)}/{extra.sub('', path.stem) or path.stem}"
                if stem in files:
                    raise SourceError(f"{files[stem]} and {path} fit the same partner; leave one of them out")
                files[stem] = path
        return dict(sorted(files.items()))


def _odd_masks(item: Field, files: Sequence[Path]) -> list[str]:
    """Return a remark if the numbers of masks are those of pictures, such as 0 and 255, or one number alone."""

    def masks() -> Iterator[Array]:
        for path in files[:: -(-len(files) // LOOKED_AT)]:
            with contextlib.suppress(UnreadableSample):  # the writing finds it again and follows --on-error
                yield decode_mask(_content(path)[1], size=None)

    line = mask_with_gaps(item.name, masks()) if len(item.shape) == 2 else colours_as_classes(item, masks())
    return [line] if line else []


def _other_palettes(name: str, files: Sequence[Path]) -> list[str]:
    """Return a remark if two masks have different colours for one number, which names another class in each then."""
    palettes = Palettes()
    for path in files[:: -(-len(files) // LOOKED_AT)]:
        with contextlib.suppress(UnreadableSample):  # the writing finds it again and follows --on-error
            if line := palettes.conflict_of(path.name, colours_used(_content(path)[1])):
                return [f"{name}: {line}"]
    return []


def _unfit(pairs: Sequence[_Pair], *, crops: bool) -> list[str]:
    """Return remarks if targets may not lie on their inputs: another ratio of height to width, or EXIF rotation."""
    looked_at, found, turned = 0, list[str](), ""
    for pair in pairs[:: -(-len(pairs) // LOOKED_AT)]:
        with contextlib.suppress(UnreadableSample):  # the writing finds it again and follows --on-error
            heads = [image_head(_content(path)[1]) for path in pair]
            looked_at += 1
            names = [f"{path.parent.name}/{path.name}" for path in pair]
            turned = turned or next((name for name, head in zip(names, heads, strict=True) if head.turned), "")
            if is_other_aspect(*((head.height, head.width) for head in heads)):
                found.append(
                    " and ".join(f"{name} {head.height}x{head.width}" for name, head in zip(names, heads, strict=True))
                )
    cropped = ", and --image-size cuts other parts out of them" if crops else ""
    remarks = [f"EXIF rotation is not applied, and {turned} has one: its pixels stay as they are stored"] * bool(turned)
    return remarks + [
        f"{len(found)} of {looked_at} pairs looked at differ in the ratio of height to width, such as {pair}: their "
        f"pixels do not lie on each other{cropped}"
        for pair in found[:1]
    ]


def _remarks_on(targets: str, pairs: Sequence[_Pair]) -> list[str]:
    """Warn about masks in JPEG files, because JPEG changes values."""
    if any(second.suffix.lower() in _LOSSY for _, second in pairs):
        return [f"{targets} holds JPEG files, whose values are smeared: fit for pictures, not for masks with classes"]
    return []


def _content(path: Path) -> tuple[str, bytes]:
    with open_regular(path) as file:
        return str(path), file.read()
