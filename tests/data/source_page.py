"""Make docs/reference/sources.md: try each kind of source, and list those read, asked about and refused.

`python -m tests.data.source_page` writes the page again.
"""

from __future__ import annotations

import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.core.errors import HpcdlError
from hpcdl.data.sources import SOURCES
from hpcdl.data.sources.base.source import _TAKEN, recognise
from hpcdl.data.write.writing import dry_run
from tests.data.doubtful import DOUBTFUL
from tests.data.published import ASKED as QUESTION
from tests.data.published import PUBLISHED, REFUSED, RIGHT, Save
from tests.data.sharding import request
from tests.data.test_asked import ASKED, UNDERSTOOD
from tests.data.test_wrong_sources import WRONG

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "sources.md"
_FLAG = re.compile(r"--[a-z][a-z-]*")
_KINDS = {"images": "csv"}

FORMS = {
    "image-folder": (
        "a folder per class with JPEG, PNG, GIF, BMP, TIFF or WebP files; or `train/`, `val/`, `test/` folders "
        "of those; or images and masks; `pip install 'hpcdl[jpeg]'` decodes JPEG 1.2 to 1.4 times as fast"
    ),
    "csv": (
        "a .csv file with `file,label` or `file,label,split` lines, with a head (`image,class`, `id,label`, "
        "...) or without; files relative to it; labels may be -1 and 1"
    ),
    "table": (
        "a .csv or .tsv file whose first line names its columns: numbers and text, between commas, semicolons "
        "or tabs; `--head none` if the first line is a sample: columns are then called `c1`, `c2`, ...; or a "
        "folder of such files with the same columns"
    ),
    "cifar10": ("the unpacked folder, binary or python version (its pickles admit plain values and arrays only)"),
    "cifar100": ("as `cifar10`, with its fine labels"),
    "mnist": ("IDX files, plain or .gz"),
    "numpy": (
        "in C or Fortran order: `.npz` (`images`/`labels`, `x`/`y`, or `x_train`, `y_train`, ...), a folder of "
        "`.npz` or of `.npy`, or one `.npy` with `--label-field`"
    ),
    "tfrecord": (
        "TFRecord files of tf.train.Example, plain, GZIP or ZLIB: a JPEG, a PNG, or raw pixels beside height, "
        "width and depth, with a class by number or name; or any features by name"
    ),
    "tfds": (
        "a folder that TensorFlow Datasets has prepared (TFRecord), of one version or above it: an image with "
        "its class, or any features by name"
    ),
    "hdf5": (
        "arrays in one file or several, under any file name (known by HDF5's signature; MATLAB's `-v7.3` .mat "
        "in MATLAB's own order of axes; netCDF-4 too, by its `scale_factor`, `add_offset`, `_FillValue`): "
        "images (N,H,W), (N,H,W,C) or (N,C,H,W) with labels, or any named fields, parts of records (compound "
        "types) as `TABLE/PART`"
    ),
    "parquet": (
        ".parquet files, in `data/` too: columns as in a table, lists, or image files with a label as Hugging "
        "Face saves them; needs `pip install 'hpcdl[parquet]'`"
    ),
    "webdataset": (
        ".tar archives whose members of one name are a sample: images with `.cls` or a label in `.json`; or "
        "`.npy`, `.txt`, `.json`, masks as named fields"
    ),
    "zip": ("a .zip of pictures, a folder per class; or `train/`, `val/`, `test/` folders of those"),
    "text": (
        "`CLASS.txt` files of lines, a folder per class of .txt files, or a .txt file with a label per line in "
        "`NAME.labels.txt`, `labels.txt` or `--label-field FILE`"
    ),
    "memmap": ("files of plain numbers, whose type and shape `--input` and `--target` state: `FILE=NAME:DTYPE:SHAPE`"),
    "reader": (
        "the samples of your own reader, `--reader FILE.py:NAME`: NIfTI, DICOM, FITS, ROOT, zarr, ... "
        "([how](../how-to/own-format.md))"
    ),
    "synthetic": (
        "`synthetic:imagenet`, `:cifar10`, `:mnist`, `:hep`, or your own `synthetic:HxWxC:CLASSES[:float32]` "
        "with `--samples N`"
    ),
}
"""What SOURCE may be, by format."""
BEHAVIOUR = {
    "a picture damaged in its middle is named by `inspect --verify`": (
        "test_verified.py::test_pictures_that_do_not_decode_are_named_by_verify"
    ),
    "... and in training, by sample and shard": (
        "test_verified.py::test_a_picture_that_does_not_decode_is_named_by_training"
    ),
    "a disk that fills up while compressed shards are written: one line, and `--resume`": (
        "test_faults.py::test_a_disk_that_fills_up_with_compressed_shards_is_reported_and_resumed"
    ),
    "`--resume` after the source changed: refused": (
        "test_resume.py::test_a_source_that_changed_is_not_mixed_by_resume"
    ),
    "`--resume` from a copy of the source: complete shards are compared with it, and kept": (
        "test_resume.py::test_a_copy_of_the_source_is_compared_and_resumed"
    ),
    "a class folder that cannot be listed: refused with its path": (
        "test_asked.py::test_an_error_while_listing_is_an_error"
    ),
    "one stat and one open per file": "test_operations.py::test_a_file_costs_one_stat_and_one_open_when_it_is_sharded",
}
"""Behaviour that the lists of sources do not show, and the test that shows it."""
CASES = {kind: {**PUBLISHED.get(kind, {}), **DOUBTFUL.get(kind, {})} for kind in [*PUBLISHED, *DOUBTFUL]}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A kind of source, the flags given, and the outcome (right, asked or refused) with its message."""

    format: str
    name: str
    flags: tuple[str, ...]
    outcome: str
    said: str


def tried() -> list[Tried]:
    """Return every kind tried, in the order of the formats."""
    return sorted(
        _all(), key=lambda one: (list(SOURCES).index(one.format), one.outcome != RIGHT, one.outcome == REFUSED)
    )


def _all() -> Iterator[Tried]:
    for kind, cases in CASES.items():
        for name, (save, options, outcome, _) in cases.items():
            yield look(kind, name, save, options, outcome)
    for name, (save, options, _) in UNDERSTOOD.items():
        yield look("", name, save, options, RIGHT)
    for name, (save, options, _) in ASKED.items():
        yield look("", name, save, options, QUESTION)
    for kind, found in WRONG.items():
        for name, (save, options, _) in found.items():
            yield look(_KINDS.get(kind, kind), name, save, options, REFUSED)


def look(kind: str, name: str, save: Save, options: Mapping[str, Any], outcome: str) -> Tried:
    """Try a source: plan its shards without writing any. Without `kind`, the format is the recognised one."""
    with tempfile.TemporaryDirectory(prefix="hpcdl-") as scratch:
        (root := Path(scratch) / "in").mkdir()
        source = save(root)
        with contextlib.suppress(HpcdlError):
            kind = kind or str(options.get("format") or recognise(str(source)))
        try:
            job = dry_run(request(source, Path(scratch) / "out", workers=1, **options))
            found, reported = RIGHT, _read_as(job)
        except HpcdlError as error:
            found, reported = ("refused" if outcome == RIGHT else outcome), str(error)
    reported = reported.replace(f"{source}/", "").replace(str(source), source.name).replace(f"{root}/", "")
    flags = tuple(f"--{key.replace('_', '-')}" for key in options)
    return Tried(format=kind or "image-folder", name=name, flags=flags, outcome=found, said=reported)


def _read_as(job: Any) -> str:
    splits = ", ".join(f"{name} {count}" for name, count in job.plan.num_samples.items())
    shape = "x".join(map(str, job.sample_shape))
    pictures = f"{shape} {job.dtype}, {len(job.facts.class_names)} classes"
    what = [pictures] if job.pictures else [item.describe() for item in job.fields]
    return "; ".join([*what, splits, *job.facts.remarks])


def page() -> str:
    """Return the whole page."""
    found = tried()
    right, asked, refused = (sum(one.outcome == outcome for one in found) for outcome in (RIGHT, QUESTION, REFUSED))
    lines = [
        "# Sources, tried",
        "",
        "This page lists what `hpcdl shard` does with each kind of source: public data sets, published reports of",
        "problems, and usual faults. Its script tried each kind (`python -m tests.data.source_page`), and a test",
        f"repeats it. Of {len(found)} kinds hpcdl reads {right} correctly, asks about {asked} with two possible",
        f"readings, and refuses {refused} with the reason. `hpcdl shard --dry-run` shows its reading of yours.",
        "[Data](data.md) explains the flags; [your own reader](../how-to/own-format.md) takes other formats.",
        "",
        "| `--format` | SOURCE | its flags |",
        "|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {FORMS[name]} | {_quoted([f'--{flag}' for flag in _TAKEN.get(name, ())])} |" for name in SOURCES
    ]
    lines += [
        "",
        "Flags after *Right* were given, those after *Asked* answer, those after *Refused* are in the message.",
    ]
    for name in SOURCES:
        own = [one for one in found if one.format == name]
        lines += ["", f"## {name}", ""] if own else []
        for outcome in (RIGHT, QUESTION, REFUSED):
            lines += _kinds([one for one in own if one.outcome == outcome])
    lines += ["", "## Met while writing or reading", "", "Each is shown by a test in tests/data.", ""]
    lines += [f"- {what}" for what in BEHAVIOUR]
    return "\n".join(lines) + "\n"


def _kinds(found: Sequence[Tried]) -> Iterator[str]:
    """Yield the kinds of one outcome, one line for all that need the same flags."""
    groups: dict[str, dict[str, None]] = {}
    for one in found:
        flags = one.flags if one.outcome == RIGHT else tuple(_FLAG.findall(one.said))
        groups.setdefault(_quoted(flags), {}).setdefault(one.name)
    for flags, names in sorted(groups.items(), key=lambda item: item[0] != ""):
        how = f" {flags}" if flags else ""
        escaped = re.sub(r"([*_<>\[\]])", r"\\\1", "; ".join(names))
        yield f"- **{found[0].outcome.capitalize()}**{how}: {escaped}"


def _quoted(flags: Sequence[str]) -> str:
    return " ".join(f"`{flag.replace('_', '-')}`" for flag in dict.fromkeys(flags))


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
