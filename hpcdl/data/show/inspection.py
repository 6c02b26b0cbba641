"""Inspect a data folder: samples, values, duplicates, shapes, classes, layout; and verify every byte."""

from __future__ import annotations

import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.storage.disk import check_outputs, make_output_folder
from hpcdl.core.storage.files import write_output
from hpcdl.data.format.dataset import Dataset, FileOperationsCounter, Split, open_dataset, way_to_repair
from hpcdl.data.format.manifest import FILE_NAME, IMAGES, LABELS, Field, Manifest, ShardEntry, read_manifest
from hpcdl.data.format.order import mixed, permuted
from hpcdl.data.format.shard_file import faults
from hpcdl.data.read.reader import OpenShard, SplitReader
from hpcdl.data.show.copies import (
    INSPECTED,
    MANY_REPEATS,
    MOST_COMPARED,
    Repeats,
    all_keys,
    find_repeats,
    is_rich,
    shows_two_classes,
    turned,
    with_two_classes,
)
from hpcdl.data.sources.base.source import Array, UnreadableSample
from hpcdl.data.sources.layouts.images import check_encoded, decode
from hpcdl.data.write.lustre import Stripes, file_system_of, stripes_of

MOST_MEASURED = 256
"""Samples of a split from which value ranges are computed."""
MOST_DRAWN = 12


@dataclass(frozen=True, kw_only=True)
class ValueRange:
    """The numbers of a field in `num_samples` samples of a split; `missing` of `count` are NaN, and are ignored."""

    field: str
    split: str
    num_samples: int
    count: int
    missing: int
    infinite: int
    low: float
    high: float
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class DrawnSample:
    """One sample: its split, its number, and the value of each field (a class by name, text as text)."""

    split: str
    number: int
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Overview:
    """All that the page shows; `repeats` is None if samples have no checksums to compare."""

    inspection: Inspection
    fields: Sequence[Field]
    ranges: Sequence[ValueRange]
    repeats: Sequence[Repeats] | None
    samples: Sequence[DrawnSample]
    of_two_classes: Sequence[str] = ()
    """A warning of samples with the same inputs and other classes, if there are any."""


def look(folder: Path) -> Overview:
    """Inspect a data folder. Raises UsageError if it is none, CorruptError if the data read is damaged."""
    inspection = inspect(folder)
    dataset = open_dataset(str(folder))
    seed = dataset.manifest.seed if dataset.manifest else 0
    ranges: list[ValueRange] = []
    drawn: list[DrawnSample] = []
    for split in dataset.splits.values():
        reader = SplitReader(folder, dataset, split)
        try:
            count = min(MOST_MEASURED, split.num_samples)
            # The beginning of a permutation: a random choice without repeats.
            ids = permuted(np.arange(count, dtype=np.int64), split.num_samples, mixed(seed, INSPECTED))
            values = {field.name: _read(reader, field, ids) for field in dataset.fields}
            numbers = [field for field in dataset.fields if field.kind not in ("class", "text")]
            ranges += [_range(field, split.name, values[field.name]) for field in numbers]
            if split.name == dataset.train_split.name:
                drawn = [
                    DrawnSample(
                        split=split.name, number=number, values={name: array[row] for name, array in values.items()}
                    )
                    for row, number in enumerate(ids[:MOST_DRAWN].tolist())
                ]
        finally:
            reader.close()
    keys = all_keys(dataset)
    return Overview(
        inspection=inspection, fields=dataset.fields, ranges=ranges, samples=drawn,
        repeats=None if keys is None else find_repeats(keys),
        of_two_classes=[] if keys is None else with_two_classes(dataset, keys),
    )  # fmt: skip


def leaks(folder: Path, overview: Overview | None = None) -> list[str]:
    """Return a warning for each pair of splits that share samples, and for samples that are repeated or of two classes.

    Without an `overview` samples are compared here, unless there are too many to do it in passing.
    """
    dataset = open_dataset(str(folder))
    repeats, of_two_classes = (overview.repeats, overview.of_two_classes) if overview else (None, [])
    num_samples = sum(split.num_samples for split in dataset.splits.values())
    repeated = any(is_rich(field) and field.kind != "text" for field in dataset.inputs)
    compares = len(dataset.splits) > 1 or repeated or shows_two_classes(dataset)
    if overview is None and compares and num_samples <= MOST_COMPARED and (keys := all_keys(dataset)) is not None:
        repeats, of_two_classes = find_repeats(keys), with_two_classes(dataset, keys)
    lines = [
        f"{pair.num_samples} of {dataset.splits[pair.split].num_samples} samples of {pair.split} have the same inputs "
        f"as samples of {pair.other}, the first is sample {pair.example} of {pair.split}. If they are copies, results "
        f"on {pair.split} are too good: take them out of the source"
        for pair in repeats or ()
        if pair.split != pair.other
    ]
    lines += [
        f"{pair.num_samples} of {dataset.splits[pair.split].num_samples} samples of {pair.split} have the same inputs "
        f"as others of it, the first is sample {pair.example}: is a part of the source there twice, under two names?"
        for pair in repeats or ()
        if repeated
        and pair.split == pair.other
        and MANY_REPEATS * pair.num_samples >= dataset.splits[pair.split].num_samples
    ]
    if len(dataset.splits) > 1 and num_samples <= MOST_COMPARED:
        lines += turned(dataset)
    return [*lines, *of_two_classes]


def _read(reader: SplitReader, field: Field, ids: npt.NDArray[np.int64]) -> list[Any]:
    """Return a field of samples: arrays, class names or text."""
    if field.encoded:
        return [decoded(reader, field, sample) for sample in ids.tolist()]
    values = list(reader.read(field, ids))
    if field.kind == "class":
        names = field.class_names
        return [names[number] if 0 <= number < len(names) else str(number) for number in map(int, values)]
    return [bytes(value).decode("utf-8", "replace") for value in values] if field.kind == "text" else values


def _range(field: Field, split: str, values: Sequence[Array]) -> ValueRange:
    flat = np.concatenate([np.asarray(value).reshape(-1).astype(np.float64) for value in values])
    finite = flat[np.isfinite(flat)]
    # numpy raises for the least of no values.
    some = finite if len(finite) else np.array([np.nan])
    return ValueRange(
        field=field.name,
        split=split,
        num_samples=len(values),
        count=len(flat),
        missing=int(np.isnan(flat).sum()),
        infinite=int(np.isinf(flat).sum()),
        low=float(some.min()),
        high=float(some.max()),
        mean=float(some.mean()),
        std=float(some.std()),
    )


_MOST_NAMED = 100
_SHARDS = "shard-*.h5"


@dataclass(frozen=True, kw_only=True)
class SplitInspection:
    """One split; `histogram` counts samples by class name."""

    name: str
    num_samples: int
    num_shards: int
    num_bytes: int
    histogram: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A whole data folder; `stripes` are those of its first shard, None if it is not on Lustre."""

    name: str
    folder: str
    source_format: str
    encoding: str
    compression: str | None
    sample_shape: Sequence[int]
    dtype: str
    num_classes: int
    block_samples: int
    seed: int
    hpcdl_version: str
    file_system: str
    stripes: Stripes | None
    num_skipped: int
    splits: Sequence[SplitInspection]
    fields: Sequence[Field] = ()
    reader: str = ""
    """The user's own reader that made the data; `reader_sha256` is the SHA-256 of its file."""
    reader_sha256: str = ""
    understood: Sequence[str] = ()
    """Remarks of the plan: how the source was read, and what is doubtful in it."""
    unknown_shards: Sequence[str] = ()
    """Files named like shards that the manifest does not list; they are never read."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The result of reading every byte; `faults` name shard and block, `bad_shards` are files below the folder.

    `undecodable` names shard and sample of encoded images that do not decode although their checksums are right: they
    were damaged before sharding. `num_decoded` counts those that do.
    """

    num_shards: int
    num_bytes: int
    faults: Sequence[str]
    bad_shards: Sequence[str]
    undecodable: Sequence[str] = ()
    num_decoded: int = 0


def inspect(folder: Path) -> Inspection:
    """Describe a data folder. Raises UsageError if it is none, CorruptError if manifest or shard sizes are wrong."""
    dataset = open_dataset(str(folder))
    manifest = dataset.manifest
    assert manifest is not None
    file_system = file_system_of(folder)
    stripes = None
    if file_system.is_lustre and shutil.which("lfs"):
        stripes = stripes_of(folder / manifest.shards()[0].file)
    return Inspection(
        name=manifest.name,
        folder=str(folder),
        source_format=manifest.source.get("format", "unknown"),
        encoding=manifest.encoding,
        compression=manifest.compression,
        sample_shape=manifest.sample_shape,
        dtype=manifest.dtype,
        num_classes=manifest.num_classes,
        block_samples=manifest.block_samples,
        seed=manifest.seed,
        hpcdl_version=manifest.hpcdl_version,
        file_system=file_system.kind,
        stripes=stripes,
        num_skipped=len(manifest.skipped),
        splits=[_split(dataset, manifest, name) for name in manifest.splits],
        fields=() if manifest.pictures else manifest.fields,
        reader=manifest.source.get("reader", ""),
        reader_sha256=manifest.source.get("reader_sha256", ""),
        understood=manifest.understood,
        unknown_shards=_unknown_shards(folder, manifest),
    )


def _unknown_shards(folder: Path, manifest: Manifest) -> list[str]:
    known_files = {entry.file for entry in manifest.shards()}
    names = (path.relative_to(folder).as_posix() for path in [*folder.glob(_SHARDS), *folder.glob(f"*/{_SHARDS}")])
    return sorted(name for name in names if name not in known_files)


def verify(folder: Path, *, on_bytes: Callable[[int], None] = lambda _: None) -> Verification:
    """Read every byte of every shard in parallel and compare checksums; `on_bytes` gets the size of each part checked.

    Encoded images of shards with the right checksums are decoded as well.
    """
    manifest = _manifest(folder)
    shards = manifest.shards()
    lock = threading.Lock()

    def on_bytes_safely(count: int) -> None:
        with lock:
            # `on_bytes` is called by all threads at once.
            on_bytes(count)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        faults_of_shards = list(pool.map(lambda entry: faults(folder, entry, on_bytes_safely), shards))
        sound = [entry for entry, several in zip(shards, faults_of_shards, strict=True) if not several]
        decoded = sound if manifest.encoding == "encoded" else []
        of_shards = pool.map(lambda entry: _undecodable(folder, entry, manifest.class_names, on_bytes_safely), decoded)
        undecodable = [undecodable_image for several in of_shards for undecodable_image in several]
    return Verification(
        num_shards=len(shards),
        num_bytes=sum(entry.num_bytes for entry in shards),
        faults=[fault for several in faults_of_shards for fault in several],
        bad_shards=[entry.file for entry, several in zip(shards, faults_of_shards, strict=True) if several],
        undecodable=undecodable,
        num_decoded=sum(entry.num_samples for entry in decoded) - len(undecodable),
    )


def _undecodable(
    folder: Path, entry: ShardEntry, class_names: Sequence[str], on_bytes: Callable[[int], None]
) -> list[str]:
    """List the images of an encoded shard that do not decode, and why; `on_bytes` gets the size of each image."""
    problems = []
    # Every byte was compared with its checksum a moment ago.
    shard = OpenShard(folder / entry.file, entry, operations=FileOperationsCounter(), verified=False)
    try:
        labels = shard.residents[LABELS]
        for number in range(entry.num_samples):
            content = bytes(shard.read_variable(IMAGES, number))
            try:
                check_encoded(content, decodes=True)
            except UnreadableSample as error:
                problems.append(f"{entry.file}: sample {number} (class {class_names[labels[number]]}): {error}")
            on_bytes(len(content))
    finally:
        shard.close()
    return problems


def require_sound(folder: Path, verification: Verification) -> None:
    """Raise CorruptError with a line for each bad block and undecodable image, unless all is well."""
    lines = [f"damaged: {fault}" for fault in verification.faults]
    lines += [f"does not decode: {undecodable_image}" for undecodable_image in verification.undecodable[:_MOST_NAMED]]
    if (num_more := len(verification.undecodable) - _MOST_NAMED) > 0:
        lines.append(f"... and {num_more} more that do not decode; --json names all")
    if verification.faults:
        bad, all_of_them = len(verification.bad_shards), verification.num_shards
        lines.append(
            f"{bad} of {all_of_them} shards in {folder} are damaged; write them again with {way_to_repair(folder)}"
        )
    if count := len(verification.undecodable):
        lines.append(
            f"{count} of {count + verification.num_decoded} pictures in {folder} do not decode, and were so when they "
            "were sharded (their checksums fit); shard the source again with --on-error skip, which names them and "
            "leaves them out"
        )
    if lines:
        raise CorruptError(*lines)


def bytes_to_verify(folder: Path) -> int:
    """Estimate the bytes that `verify` reports: encoded images are read a second time to be decoded."""
    manifest = _manifest(folder)
    return sum(entry.num_bytes for entry in manifest.shards()) * (2 if manifest.encoding == "encoded" else 1)


def _manifest(folder: Path) -> Manifest:
    if not (folder / FILE_NAME).is_file():
        open_dataset(str(folder))  # raises with the reason
        raise UsageError(f"{folder} holds no {FILE_NAME}")
    return read_manifest(folder)[0]


def _split(dataset: Dataset, manifest: Manifest, name: str) -> SplitInspection:
    entry = manifest.splits[name]
    classes = [field.name for field in manifest.fields if field.role == "target" and field.kind == "class"]
    return SplitInspection(
        name=name,
        num_samples=entry.num_samples,
        num_shards=len(entry.shards),
        num_bytes=sum(shard.num_bytes for shard in entry.shards),
        histogram=_histogram(dataset, manifest, name, classes[0]) if len(classes) == 1 else {},
    )


def _histogram(dataset: Dataset, manifest: Manifest, name: str, label: str) -> dict[str, int]:
    assert dataset.folder is not None
    entry = manifest.splits[name]
    counts = np.zeros(manifest.num_classes, np.int64)
    reader = SplitReader(dataset.folder, dataset, dataset.splits[name])
    try:
        for number in range(len(entry.shards)):
            labels = reader.shard(number).residents.get(label, np.full(1, -1))
            if labels.size and not 0 <= labels.min() <= labels.max() < manifest.num_classes:
                raise CorruptError(
                    f"shard {entry.shards[number].file} holds labels out of range; check it with --verify"
                )
            counts += np.bincount(labels, minlength=manifest.num_classes)
    finally:
        reader.close()
    return dict(zip(manifest.class_names, counts.tolist(), strict=True))


def write_pictures(dataset: Dataset, split: Split, count: int, folder: Path) -> list[Path]:
    """Write `count` samples of `split`, chosen by the data's seed, into `folder`: SPLIT-NUMBER-CLASS.png."""
    assert dataset.folder is not None
    if not dataset.pictures:
        raise UsageError(f"--samples saves pictures, and {dataset.name} holds named fields; read them with h5py")
    make_output_folder(folder)
    reader = SplitReader(dataset.folder, dataset, split)
    positions = np.arange(min(count, split.num_samples), dtype=np.int64)
    ids = permuted(positions, split.num_samples, mixed(dataset.manifest.seed if dataset.manifest else 0, 31))
    written: dict[Path, int] = {}
    try:
        labels = np.asarray(reader.read(dataset.targets[0], ids))
        for sample, label in zip(ids.tolist(), labels.tolist(), strict=True):
            name = re.sub(r"[^\w.-]", "_", dataset.class_names[label])[:40]
            written[folder / f"{split.name}-{sample:08d}-{name}.png"] = sample
        check_outputs(written)
        for path, sample in written.items():
            write_output(path, _png(_pixels(reader, dataset.inputs[0], sample)))
    finally:
        reader.close()
    return [*written]


def _pixels(reader: SplitReader, field: Field, sample: int) -> Any:
    """Return an image as PIL expects it: uint8, one or three channels."""
    if field.encoded:
        return decoded(reader, field, sample)
    image = np.asarray(reader.read(field, np.array([sample], np.int64))[0])
    if image.dtype != np.uint8:
        low, high = float(image.min()), float(image.max())
        image = ((image.astype(np.float32) - low) / max(high - low, 1e-12) * 255).astype(np.uint8)
    return image if image.shape[2] == 3 else image[:, :, 0]


def decoded(reader: SplitReader, field: Field, sample: int) -> Any:
    """Return the pixels (H, W, 3) of an encoded image; CorruptError with shard and sample if it does not decode."""
    try:
        return decode(bytes(reader.read(field, np.array([sample], np.int64))[0]), size=None, channels=3)
    except UnreadableSample as error:
        raise CorruptError(
            f"{reader.describe(sample)} is damaged: {error}; `hpcdl inspect DIR --verify` names all such samples"
        ) from error


def _png(pixels: Any) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
