"""The data set a model is trained on: a folder written by `hpcdl shard`, or synthetic samples made from a seed.

Synthetic sample i is a slice of a fixed noise pool plus the slice of its class, each at half strength. Making a sample
costs no more than copying it, sample i is the same on every rank, and a network can learn the classes.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.paths import typed
from hpcdl.core.records.run_record import FILE_NAME as RECORD_NAME
from hpcdl.core.storage.lock import check_free
from hpcdl.core.units import IMAGES, SAMPLES
from hpcdl.data.format.manifest import (
    FILE_NAME,
    Field,
    Manifest,
    SplitEntry,
    is_picture,
    picture_with_class,
    read_manifest,
)
from hpcdl.data.format.order import Ids, mixed

PREFIX = "synthetic:"
_POOL = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """Samples to make: `sample_shape` is (height, width, channels), `dtype` uint8, float16 or float32 (in [0, 1])."""

    name: str
    num_samples: int
    sample_shape: tuple[int, int, int]
    num_classes: int
    dtype: str = "uint8"


KNOWN = {
    spec.name: spec
    for spec in (
        SyntheticSpec(name="mnist", num_samples=60_000, sample_shape=(28, 28, 1), num_classes=10),
        SyntheticSpec(name="cifar10", num_samples=50_000, sample_shape=(32, 32, 3), num_classes=10),
        SyntheticSpec(name="imagenet", num_samples=1_281_167, sample_shape=(224, 224, 3), num_classes=1000),
        SyntheticSpec(name="hep", num_samples=400_000, sample_shape=(224, 224, 3), num_classes=2, dtype="float32"),
    )
}
_OWN = re.compile(r"(\d+)x(\d+)x(\d+):(\d+)(?::(uint8|float16|float32))?")


def parse_spec(text: str) -> SyntheticSpec:
    """Parse `synthetic:NAME` or `synthetic:HxWxC:CLASSES[:DTYPE]`, each optionally followed by `@SAMPLES`."""
    body, at, count = text.removeprefix(PREFIX).partition("@")
    match = _OWN.fullmatch(body)
    if body in KNOWN:
        spec = KNOWN[body]
    elif match:
        shape = (int(match[1]), int(match[2]), int(match[3]))
        dtype = match[5] or "uint8"
        spec = SyntheticSpec(name=body, num_samples=100_000, sample_shape=shape, num_classes=int(match[4]), dtype=dtype)
    else:
        spec = None
    if spec is None or (at and not count.isdigit()) or min(*spec.sample_shape, spec.num_classes) < 1:
        known_names = ", ".join(PREFIX + name for name in KNOWN)
        raise UsageError(
            f"unknown data {text!r}; known: {known_names}, or your own shape: synthetic:HxWxC:CLASSES[:float32]"
        )
    if not at:
        return spec
    if int(count) < 1:
        raise UsageError(f"{text!r} asks for no samples; write for example {PREFIX}{body}@1000")
    return SyntheticSpec(**{**spec.__dict__, "num_samples": int(count)})


class SyntheticImages:
    """Makes the samples of a spec; the same ids and seed give the same bytes on every machine."""

    def __init__(self, spec: SyntheticSpec, *, seed: int = 0) -> None:
        self.spec = spec
        self._size = int(np.prod(spec.sample_shape))
        self._seed = seed
        # A slice may begin at the pool's last byte, and needs a whole sample behind it.
        length = _POOL + self._size
        # Splitmix64 by hand: the bytes must not change with numpy's generators.
        random_words = np.arange(-(-length // 8), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(
            mixed(seed, 3)
        )
        random_words = (random_words ^ random_words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        random_words = (random_words ^ random_words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        # Little-endian, so that the bytes are the same on every machine.
        noise = (random_words ^ random_words >> np.uint64(31)).astype("<u8").view(np.uint8)[:length]
        if spec.dtype == "uint8":
            self._pool: npt.NDArray[Any] = noise >> np.uint8(1)  # half strength: the sum of two fits in a byte
        else:
            self._pool = (noise.astype(np.float32) / np.float32(510)).astype(spec.dtype)  # the sum of two is at most 1

    def labels(self, ids: Ids) -> Ids:
        """Return the class of each sample."""
        return np.array([mixed(self._seed, 4, int(i)) % self.spec.num_classes for i in ids], np.int64)

    def read_samples(self, ids: Ids, out: npt.NDArray[Any]) -> None:
        """Make the samples `ids` and store them in `out`, shaped (len(ids), H, W, C)."""
        # Only slices of the pool are added: a step then measures the network and not the making of samples.
        rows = out.reshape(len(ids), self._size)
        for row, sample, label in zip(rows, ids, self.labels(ids), strict=True):
            noise = mixed(self._seed, 5, int(sample)) % _POOL
            template = mixed(self._seed, 6, int(label)) % _POOL
            np.add(self._pool[noise : noise + self._size], self._pool[template : template + self._size], out=row)


UNSPLIT = "all"
"""Name of the only split of data that has no division into splits."""
PARTIAL_PREFIX = "manifest.partial"


@dataclass(frozen=True, kw_only=True)
class FileOperations:
    """Counts of system calls that name a file; on a parallel file system the metadata server answers them."""

    opens: int = 0
    stats: int = 0

    def __add__(self, other: FileOperations) -> FileOperations:
        return FileOperations(opens=self.opens + other.opens, stats=self.stats + other.stats)

    def __sub__(self, other: FileOperations) -> FileOperations:
        return FileOperations(opens=self.opens - other.opens, stats=self.stats - other.stats)

    @property
    def total(self) -> int:
        """The number of all calls."""
        return self.opens + self.stats


class FileOperationsCounter:
    """Counts the file operations of this process on one data set, over all its readers and their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = FileOperations()

    @property
    def seen(self) -> FileOperations:
        """All operations counted so far."""
        return self._seen

    def add(self, *, opens: int = 0, stats: int = 0) -> None:
        """Add to the counts."""
        with self._lock:
            self._seen += FileOperations(opens=opens, stats=stats)


@dataclass(frozen=True, kw_only=True)
class Split:
    """One split of a data set; `entry` is None for synthetic samples."""

    name: str
    num_samples: int
    entry: SplitEntry | None = None


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A data set: `checksum` identifies the content; `fields` are the parts of a sample, inputs first."""

    name: str
    fields: tuple[Field, ...]
    pictures: bool
    """Whether samples are images with a class, which can be augmented, rather than fields named by the user."""
    num_classes: int | None
    class_names: tuple[str, ...]
    checksum: str
    splits: Mapping[str, Split]
    folder: Path | None = None
    manifest: Manifest | None = None
    synthetic: SyntheticSpec | None = None
    seed: int = 0
    verified: bool = True
    """Whether data read from shards is checked against its checksums."""
    copies: Mapping[Path, Path] = field(default_factory=dict)
    """Maps shards to the copies that this process reads instead: see read/staging.py."""
    nodes: tuple[int, ...] = ()
    """The node number of each worker if every node shuffles and reads its own share; otherwise empty."""
    preprocess: Callable[..., Any] | None = None
    """The function applied last to each batch: (inputs, targets, training=, seed=) to (inputs, targets), tensors."""
    scale: str = "0..1"
    """How training scales uint8 inputs: `0..1` leaves the scaling to the step, `auto` scales images only."""
    operations: FileOperationsCounter = field(default_factory=FileOperationsCounter, repr=False, compare=False)
    """File operations on the folder's files: those of opening it, and those of its readers since."""

    def scales(self, shape: Sequence[int]) -> bool:
        """Return whether uint8 samples of an input of this `shape` are scaled to 0..1."""
        return self.scale == "0..1" or (self.scale == "auto" and (self.pictures or is_picture(shape)))

    @property
    def keeps_bytes(self) -> bool:
        """Whether uint8 values of an input are passed to the model without scaling."""
        of_bytes = (field for field in self.inputs if field.dtype == "uint8" and field.kind != "text")
        return any(field.normalise == "none" and not self.scales(field.shape) for field in of_bytes)

    @property
    def train_split(self) -> Split:
        """Return `train`, or the only split; UsageError if there are several and none is called train."""
        if "train" in self.splits:
            return self.splits["train"]
        if len(self.splits) == 1:
            return next(iter(self.splits.values()))
        raise UsageError(f"{self.name} has the splits {', '.join(self.splits)}; one of them must be called 'train'")

    @property
    def evaluation_split(self) -> Split | None:
        """Return `val`, else `test`, else None."""
        return self.splits.get("val") or self.splits.get("test")

    @property
    def inputs(self) -> tuple[Field, ...]:
        """The fields that the model takes as input."""
        return tuple(field for field in self.fields if field.role == "input")

    @property
    def targets(self) -> tuple[Field, ...]:
        """The fields that the model's outputs are compared with."""
        return tuple(field for field in self.fields if field.role == "target")

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """The shape of the first input; (height, width, channels) for images."""
        return tuple(self.inputs[0].shape)

    @property
    def dtype(self) -> str:
        """The type of the first input."""
        return self.inputs[0].dtype

    @property
    def counted(self) -> str:
        """The unit that a run on this data set counts: images or samples."""
        return IMAGES if self.pictures else SAMPLES

    @property
    def encoded(self) -> bool:
        """Whether samples are stored as JPEG or PNG files and decoded during training."""
        return any(field.encoded for field in self.fields)


def open_dataset(data: str, *, seed: int = 0, verified: bool = True) -> Dataset:
    """Open the data set of a folder or of `synthetic:NAME`; `seed` is the seed of synthetic samples.

    With `verified`, data read later is checked against its checksums.

    Raises UsageError if the folder does not exist, is no data folder or is not finished. Raises CorruptError if the
    manifest is damaged, or a shard is missing or has another size than the manifest says.
    """
    if data.startswith(PREFIX):
        return _synthetic(data, seed)
    folder = Path(data).expanduser()
    if not data:
        raise UsageError(
            "the data folder's name is empty (a variable that is not set?); name one of `hpcdl shard`, or `.`"
        )
    if not folder.is_dir():
        raise UsageError(f"no such data folder: {data}; make one with `{typed('shard', 'SOURCE', folder)}`")
    if not (folder / FILE_NAME).is_file():
        # Two commands write such folders, and each continues only its own.
        if any(folder.glob(PARTIAL_PREFIX + "*")):
            check_free(folder)
            command = "hpcdl infer" if _is_of_inference(folder) else "hpcdl shard"
            raise UsageError(f"{data} is not finished; continue with the same `{command}` command and --resume")
        if (folder.parent / FILE_NAME).is_file() and any(folder.glob("shard-*.h5")):
            raise UsageError(f"{data} is one split of a data folder; give {folder.parent}")
        if any(folder.glob("shard-*.h5")) or any(folder.glob("*/shard-*.h5")):
            raise UsageError(f"{data} holds shards without their {FILE_NAME}; copy it there, or shard the source again")
        if (folder / "run.toml").is_file():
            raise UsageError(f"{data} is a run directory, not a data folder; `{typed('runs', folder)}` shows it")
        raise UsageError(
            f"{data} holds no {FILE_NAME}; make a data folder with `{typed('shard', folder, 'NEW_FOLDER')}`"
        )
    operations = FileOperationsCounter()
    manifest, checksum = read_manifest(folder)
    operations.add(opens=1, stats=2)  # the manifest; and the two checks above
    _check_sizes(folder, manifest, operations)
    dataset = described_by(manifest, checksum)
    return dataclasses.replace(dataset, folder=folder, verified=verified, operations=operations)


def described_by(manifest: Manifest, checksum: str) -> Dataset:
    """Return the data set that a manifest describes, of which no sample can be read."""
    return Dataset(
        name=manifest.name,
        fields=tuple(manifest.fields),
        pictures=manifest.pictures,
        num_classes=manifest.num_classes or None,
        class_names=tuple(manifest.class_names),
        checksum=checksum,
        splits={
            name: Split(name=name, num_samples=entry.num_samples, entry=entry)
            for name, entry in manifest.splits.items()
        },
        manifest=manifest,
    )


def _check_sizes(folder: Path, manifest: Manifest, operations: FileOperationsCounter) -> None:
    for shard in manifest.shards():
        operations.add(stats=1)
        try:
            size = (folder / shard.file).stat().st_size
        except OSError as error:
            raise CorruptError(
                f"shard {folder / shard.file} cannot be read ({error.strerror}){_remedy(folder)}"
            ) from error
        # A copy that was cut short is found here, before a run begins; wrong bytes are found when they are read.
        if size != shard.num_bytes:
            raise CorruptError(
                f"shard {folder / shard.file} has {size} bytes, the manifest says {shard.num_bytes}{_remedy(folder)}"
            )


def _remedy(folder: Path) -> str:
    return f"; mend it with {way_to_repair(folder)}"


def way_to_repair(folder: Path) -> str:
    """Return the command to type for a folder with damaged shards."""
    if _is_of_inference(folder):
        return "the same `hpcdl infer` command and --resume"
    return f"`{typed('inspect', folder, '--repair', '--from', 'SOURCE')}`"


def _is_of_inference(folder: Path) -> bool:
    """Return whether `hpcdl infer` made the folder: `hpcdl shard` writes no run record."""
    return (folder / RECORD_NAME).is_file()


def _synthetic(data: str, seed: int) -> Dataset:
    spec = parse_spec(data)
    names = tuple(str(number) for number in range(spec.num_classes))
    return Dataset(
        name=data,
        fields=picture_with_class(spec.sample_shape, spec.dtype, names),
        pictures=True,
        num_classes=spec.num_classes,
        class_names=names,
        # The seed makes the samples: --resume must see another one as other data.
        checksum=f"{data}#{seed}",
        splits={"train": Split(name="train", num_samples=spec.num_samples)},
        synthetic=spec,
        seed=seed,
    )
