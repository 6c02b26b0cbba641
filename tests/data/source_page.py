"""docs/reference/sources.md: what is recognised, asked and refused, found out by trying.

`python -m tests.data.source_page` writes the page anew.
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
from hpcdl.data.sources.base.flags import _TAKEN
from hpcdl.data.sources.base.source import recognise
from hpcdl.data.write.writing import dry_run
from tests.data.doubtful import DOUBTFUL
from tests.data.published import ASKED as QUESTION
from tests.data.published import PUBLISHED, REFUSED, RIGHT, Save
from tests.data.sharding import request
from tests.data.test_asked import ASKED, UNDERSTOOD
from tests.data.test_wrong_sources import WRONG

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "sources.md"
_LONGEST = 260
_OTHERS = re.compile(r"(cannot be read as Parquet|no HDF5 file that can be read|is no array of numbers|is no JSON): .*")
"""What another library says behind these words differs from version to version."""
_KINDS = {"images": "csv"}

FORMS = {
    "image-folder": (
        "a folder per class with JPEG, PNG, GIF, BMP, TIFF or WebP files; or `train/`, `val/`, `test/` folders "
        "of those; or images and masks, see below; `pip install 'hpcdl[jpeg]'` decodes JPEG 1.2 to 1.4 times "
        "as fast, to the same pixels"
    ),
    "csv": (
        "a .csv file with `file,label` or `file,label,split` lines, with a head (`image,class`, `id,label`, "
        "...) or without; files relative to it; labels may be -1 and 1"
    ),
    "table": (
        "a .csv or .tsv file whose first line names its columns: numbers and text, between commas, semicolons "
        "or tabs, see below; `--head none` where the first line is a sample: columns are then called `c1`, "
        "`c2`, ..."
    ),
    "cifar10": (
        "the unpacked folder, binary or python version (fine labels); pickles are read by an unpickler that "
        "admits plain values and arrays only"
    ),
    "cifar100": (
        "the unpacked folder, binary or python version (fine labels); pickles are read by an unpickler that "
        "admits plain values and arrays only"
    ),
    "mnist": ("IDX files, plain or .gz"),
    "numpy": (
        "in C or Fortran order: `.npz` (`images`/`labels`, `x`/`y`, or `x_train`, `y_train`, ...), a folder of "
        "`.npy`, or one with `--label-field`"
    ),
    "tfrecord": (
        "TFRecord files of tf.train.Example, plain, GZIP or ZLIB: a JPEG, a PNG, or raw pixels beside height, "
        "width and depth, with a class by number or name; or any features by name"
    ),
    "tfds": (
        "a folder that TensorFlow Datasets has prepared (TFRecord), of a version or above it: an image with "
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
        "`CLASS.txt` files of lines, a folder per class of .txt files, or a .txt file with a label a line in "
        "`NAME.labels.txt`, `labels.txt` or `--label-field FILE`"
    ),
    "memmap": ("files of plain numbers, whose type and shape `--input` and `--target` state: `FILE=NAME:DTYPE:SHAPE`"),
    "reader": (
        "what ten lines of your own return, `--reader FILE.py:NAME`: NIfTI, DICOM, FITS, ROOT, zarr, ... "
        "([how](../how-to/own-format.md))"
    ),
    "synthetic": (
        "`synthetic:imagenet`, `:cifar10`, `:mnist`, `:hep`, or your own `synthetic:HxWxC:CLASSES[:float32]` "
        "with `--samples N`"
    ),
}
"""What SOURCE is, by format."""
BEHAVIOUR = {
    "a picture damaged in its middle is named by `inspect --verify`": (
        "test_verified.py::test_pictures_that_do_not_decode_are_named_by_verify"
    ),
    "... and in training, by sample and shard": (
        "test_verified.py::test_a_picture_that_does_not_decode_is_named_by_training"
    ),
    "a disk that fills up while compressed shards are written: one line, and `--resume`": (
        "test_faults.py::test_a_disk_that_fills_up_with_compressed_shards_is_told_and_resumed"
    ),
    "`--resume` after the source changed: refused": (
        "test_resume.py::test_a_source_that_changed_is_not_mixed_by_resume"
    ),
    "`--resume` from a copy of the source: whole shards are compared with it, and kept": (
        "test_resume.py::test_a_copy_of_the_source_is_compared_and_resumed"
    ),
    "a class folder that cannot be listed: refused with its path": (
        "test_asked.py::test_an_error_while_listing_is_an_error"
    ),
    "one stat and one open a file": "test_operations.py::test_a_file_costs_one_stat_and_one_open_when_it_is_sharded",
}
"""Cases that no listing shows, and the test that does."""
CASES = {kind: {**PUBLISHED.get(kind, {}), **DOUBTFUL.get(kind, {})} for kind in [*PUBLISHED, *DOUBTFUL]}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A kind of source, what was wished of it, and what came out: right, asked or refused, and the words."""

    format: str
    name: str
    flags: str
    outcome: str
    said: str


def tried() -> list[Tried]:
    """Every kind, in the order of the formats."""
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
    """Try a source: the plan is made, nothing is written. Without a `kind` it is the one that is recognised."""
    with tempfile.TemporaryDirectory(prefix="hpcdl-") as scratch:
        (root := Path(scratch) / "in").mkdir()
        source = save(root)
        with contextlib.suppress(HpcdlError):
            kind = kind or str(options.get("format") or recognise(str(source)))
        try:
            job = dry_run(request(source, Path(scratch) / "out", workers=1, **options))
            found, said = RIGHT, _read_as(job)
        except HpcdlError as error:
            found, said = ("refused" if outcome == RIGHT else outcome), str(error)
    said = said.replace(f"{source}/", "").replace(str(source), source.name).replace(f"{root}/", "")
    return Tried(
        format=kind or "image-folder", name=name, flags=_flags(options), outcome=found, said=_OTHERS.sub(r"\1", said)
    )


def _read_as(job: Any) -> str:
    splits = ", ".join(f"{name} {count}" for name, count in job.plan.num_samples.items())
    shape = "x".join(map(str, job.sample_shape))
    what = [item.describe() for item in job.fields] or [f"{shape} {job.dtype}, {len(job.facts.class_names)} classes"]
    return "; ".join([*what, splits, *job.facts.told])


def _flags(options: Mapping[str, Any]) -> str:
    words = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        many = str(value).split(",") if key in ("input", "target", "leave_out", "categories") else [value]
        words += [flag] if value is True else [f"{flag} {one}" for one in many]
    return " ".join(words)


def page() -> str:
    """The whole page."""
    found = tried()
    counts = {outcome: sum(one.outcome == outcome for one in found) for outcome in (RIGHT, QUESTION, REFUSED)}
    right, asked, refused = counts.values()
    lines = [
        "# Sources, tried",
        "",
        "What `hpcdl shard` makes of each kind of source. Each line was tried when this page was made",
        "(`python -m tests.data.source_page`), and a test tries it again: the page cannot be out of date.",
        f"Of {len(found)} kinds {right} are read rightly, {asked} are asked about because two readings are possible,",
        f"and {refused} are refused with the reason. They are what public data sets look like, what reports",
        "about them tell, and usual faults. [Data](data.md) says what the flags do;",
        "[a reader of your own](../how-to/own-format.md) takes what is not here.",
        "",
        "| `--format` | SOURCE | right | asked | refused | its flags |",
        "|---|---|---|---|---|---|",
    ]
    for name in SOURCES:
        own = [sum(one.outcome == outcome for one in found if one.format == name) for outcome in counts]
        flags = " ".join(f"`--{flag.replace('_', '-')}`" for flag in _TAKEN.get(name, ()))
        lines.append(f"| `{name}` | {FORMS[name]} | {own[0]} | {own[1]} | {own[2]} | {flags} |")
    for name in SOURCES:
        own_lines = [one for one in found if one.format == name]
        lines += ["", f"## {name}"] if own_lines else []
        for outcome in counts:
            rows = _rows([one for one in own_lines if one.outcome == outcome])
            lines += ["", f"{outcome.capitalize()}:", "", *rows] if rows else []
    lines += ["", "## Met while writing or reading", "", "| what | shown by |", "|---|---|"]
    lines += [f"| {what} | `tests/data/{where}` |" for what, where in BEHAVIOUR.items()]
    return "\n".join(lines) + "\n"


def _rows(found: Sequence[Tried]) -> list[str]:
    """One line for what is said, with all kinds that it is said of."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for one in found:
        kinds.setdefault((one.flags, one.said), []).append(one.name)
    return [
        f"- **{'; '.join(names)}**{f', `{flags}`' if flags else ''}: {_shortened(said)}"
        for (flags, said), names in kinds.items()
    ]


def _shortened(text: str) -> str:
    kept = text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0]} ..."
    return re.sub(r"([*_<>\[\]])", r"\\\1", kept)


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE}\n")
