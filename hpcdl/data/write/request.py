"""The options of `hpcdl shard`; a light module, because the command line imports it for its flags."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hpcdl.config.settings import setting
from hpcdl.core.errors import UsageError
from hpcdl.data.sources import SOURCES


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Where samples come from and how they are read."""

    format: str = setting("auto", "Format of the source.", choices=("auto", *SOURCES))
    samples: int | None = setting(None, "Samples to make, for synthetic sources.", at_least=1)
    input: tuple[str, ...] | None = setting(
        None, "What a model is given: PATH=NAME of an array or column; may be repeated.", kind="names"
    )
    target: tuple[str, ...] | None = setting(
        None,
        "What its outputs are held against: PATH=NAME; nothing: for `hpcdl infer` alone; may be repeated.",
        kind="names",
    )
    target_kind: str | None = setting(
        None, "Whether whole numbers in targets name classes or are quantities.", choices=("class", "regression")
    )
    categories: tuple[str, ...] | None = setting(
        None, "Words of a table's column as numbers: COLUMN=one-hot or COLUMN=codes; may be repeated.", kind="names"
    )
    categories_of: Path | None = setting(None, "Data folder whose words keep the numbers that they have there.")
    nan: str | None = setting(
        None, "Samples with NaN or infinity: refuse (by default), skip or keep them.", choices=("stop", "skip", "keep")
    )
    image_field: str | None = setting(None, "Where images are: an Example's field, an HDF5 path, a .npz array.")
    label_field: str | None = setting(None, "Where labels are, in the same form; for .npy the file with the labels.")
    split_names: str = setting(
        "auto",
        "Names such as train and test in the source: ask where they are doubtful, keep them as splits, or ignore them.",
        choices=("auto", "keep", "ignore"),
    )
    leave_out: tuple[str, ...] | None = setting(
        None,
        "Leave out files, folders, columns or splits of the source, by name or pattern; may be repeated.",
        kind="names",
    )
    head: str = setting(
        "auto",
        "First line of a table: names of the columns (auto asks if it seems a sample), or none: they are called c1, "
        "c2, ...",
        choices=("auto", "names", "none"),
    )
    sample_is: str | None = setting(
        None,
        "What one sample is, of several HDF5 or .npz files: a row of their arrays, or a file.",
        choices=("row", "file"),
    )
    sample_axis: str = setting(
        "first",
        "Axis of arrays that counts the samples; last: pictures of height x width x channels x N, as in MATLAB.",
        choices=("first", "last"),
    )
    follow_links: bool = setting(
        False, "Read the other files that an HDF5 file's external links and virtual data sets name."
    )
    axes: str = setting("auto", "Order of the axes of array sources.", choices=("auto", "nhwc", "nchw"))


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """How samples are stored."""

    encoding: str = setting("raw", "Pixels, or the JPEG and PNG files as they are.", choices=("raw", "encoded"))
    image_size: tuple[int, int] | None = setting(None, "Scale and centre-crop images to this size.", kind="size")
    channels: int | None = setting(
        None, "Convert images to 1, 3 or 4 channels; by default as found.", at_least=1, at_most=4
    )
    compression: str | None = setting(
        None, "Lossless compression of raw blocks; slower to read.", choices=("gzip", "zstd", "blosc2")
    )
    normalise: str | None = setting(
        None,
        "How training scales numbers, by the training samples' statistics.",
        choices=("mean-std", "0-1"),
    )
    split: str | None = setting(None, "Divide the source by class, for example train=0.8,val=0.2.")
    seed: int = setting(1, "Seed of shuffle and split, and of synthetic sources.", at_least=0)
    shards: int | None = setting(None, "Number of shards of each split.", at_least=1)
    shard_size: int | None = setting(None, "Size of a shard, in place of --shards.", kind="bytes", at_least=1)
    block_size: int | None = setting(None, "Size of what is read at once.", kind="bytes", at_least=1)
    max_ranks: int | None = setting(None, "Most ranks that will train on it; default 64, or fewer.", at_least=1)
    stripe_count: int | None = setting(None, "Lustre: number of OSTs of a shard.", at_least=-1)
    stripe_size: int | None = setting(None, "Lustre: stripe size.", kind="bytes", at_least=65536)
    stripe_pool: str | None = setting(None, "Lustre: OST pool.")


@dataclass(frozen=True, kw_only=True)
class WritingConfig:
    """How the work is done; no option changes a byte of the result."""

    workers: int | None = setting(
        None, "Most writing processes, started where that pays. Default: the cores, or 1 a rank.", at_least=1
    )
    on_error: str = setting("stop", "What to do about a sample that cannot be read.", choices=("stop", "skip"))


@dataclass(frozen=True, kw_only=True)
class ShardConfig:
    """All settings of `hpcdl shard`."""

    source: SourceConfig
    layout: LayoutConfig
    writing: WritingConfig


@dataclass(frozen=True, kw_only=True)
class ShardRequest:
    """One call of `hpcdl shard`: from `source` (a path or synthetic:NAME) into the folder `target`.

    `reader` is FILE.py:NAME, the user's own code. It is not a setting: no settings file may name code to run.
    """

    source: str
    target: Path
    config: ShardConfig
    resume: bool = False
    reader: str = ""

    def most_processes(self, *, alone: bool) -> int:
        """Return the process limit: by default one per core, or one per rank if ranks share the cores (not `alone`)."""
        return self.config.writing.workers or (len(os.sched_getaffinity(0)) if alone else 1)


def parse_split(text: str) -> dict[str, float]:
    """Parse `train=0.8,val=0.2` into fractions by name; UsageError unless they are positive and sum to 1."""
    fractions: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        try:
            fraction = float(value)
        except ValueError:
            fraction = -1.0
        if not (equals and name.isidentifier() and 0 < fraction <= 1) or name in fractions:
            raise UsageError(
                f"--split {text}: {part.strip()!r} is not NAME=FRACTION; write for example train=0.8,val=0.2"
            )
        fractions[name] = fraction
    # In floating point 0.7 + 0.2 + 0.1 is not 1.
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise UsageError(f"--split {text}: the fractions sum to {sum(fractions.values()):g}; they must sum to 1")
    return fractions
