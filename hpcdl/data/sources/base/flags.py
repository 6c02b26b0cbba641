"""Which flags about a source each format knows; any other is refused by name."""

from __future__ import annotations

from typing import Any

from hpcdl.core.errors import UsageError

_FIELDS = ("input", "target", "target_kind", "nan")
_ARRAYS = (*_FIELDS, "image_field", "label_field", "axes")
_NAMES = ("split_names", "leave_out")
_WORDS = ("categories", "categories_of")
_TAKEN: dict[str, tuple[str, ...]] = {
    "synthetic": ("samples",),
    "csv": ("image_field", "label_field", "target_kind", "nan", "leave_out"),
    "table": (*_FIELDS, *_WORDS, "leave_out", "head"),
    "cifar10": (),
    "cifar100": (),
    "mnist": (),
    "numpy": (*_ARRAYS, *_NAMES, "sample_axis"),
    "tfds": (*_FIELDS, "image_field", "label_field"),
    "tfrecord": (*_FIELDS, "image_field", "label_field", *_NAMES),
    "hdf5": (*_ARRAYS, *_NAMES, "sample_is", "sample_axis", "follow_links"),
    "webdataset": (*_FIELDS, "image_field", "label_field", *_NAMES),
    "parquet": (*_FIELDS, *_WORDS, "image_field", "label_field", *_NAMES),
    "text": (*_FIELDS, "label_field", *_NAMES),
    "memmap": _FIELDS,
    "reader": (*_FIELDS, "leave_out"),
    "zip": ("target_kind", "nan", *_NAMES),
    "image-folder": ("input", "target", "target_kind", "nan", *_NAMES),
}
"""By format; one that a site has added gets every flag."""
_UNSET = (None, False, "auto", (), "names", "first")
_REMEDIES = {
    "image_field": "images are the files of the folders",
    "label_field": "a folder's name is the class of its images; a .csv of file,label lists others",
    "axes": "the axes of its images are known",
    "sample_is": "it is for several HDF5 files",
    "follow_links": "links in folders are followed",
}


def check_flags(name: str, chosen: Any) -> None:
    """UsageError for the first setting in `chosen` that is given and that the format `name` does not know."""
    if name not in _TAKEN:
        return
    every = dict.fromkeys(flag for taken in _TAKEN.values() for flag in taken)
    for flag in every:
        value = getattr(chosen, flag, None)
        if flag in _TAKEN[name] or value in _UNSET or (flag == "samples"):
            continue
        own = ", ".join(_typed(taken) for taken in _TAKEN[name]) or "none of the flags about a source"
        remedy = f" ({_REMEDIES[flag]})" if flag in _REMEDIES and name == "image-folder" else ""
        raise UsageError(f"{_typed(flag)} is not for --format {name}{remedy}; leave it out. It takes {own}")
    if chosen.categories_of and not chosen.categories:
        raise UsageError(
            "--categories-of keeps the numbers of words, and no words are asked for; give --categories too"
        )
    named = chosen.input or chosen.target
    if named and (chosen.image_field or (chosen.label_field and name != "text")):
        flag = "image_field" if chosen.image_field else "label_field"
        raise UsageError(f"{_typed(flag)} beside --input or --target: name everything with --input and --target")


def knows(flag: str, name: str) -> bool:
    """Whether the format `name` takes this flag."""
    return name not in _TAKEN or flag in _TAKEN[name]


def _typed(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"
