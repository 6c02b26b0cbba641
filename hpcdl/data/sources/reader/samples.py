"""Convert what a user's reader returns to streams of samples, and each sample to named arrays and text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hpcdl.core.errors import shown
from hpcdl.data.format.dataset import UNSPLIT
from hpcdl.data.format.manifest import DTYPES
from hpcdl.data.sources.base.source import Array
from hpcdl.data.sources.base.splits import SPLIT_WORDS

Value = Array | bytes
"""Numbers, or the UTF-8 bytes of text."""
Roles = tuple[tuple[str, ...], tuple[str, ...]] | None
"""The names of inputs and of targets, if the reader gives them."""
_SPLIT = re.compile(r"\w[\w-]{0,63}", re.ASCII)
"""A split's name is also the name of a folder."""
RETURNS = (
    "a reader returns a generator of samples, an object with items() and read(item), a tf.data.Dataset, a Keras "
    "PyDataset, a Hugging Face or xarray Dataset, anything with len() and [number], or a dict of these by split"
)
_SAMPLES = "a sample is a dict of arrays, numbers and strings, or a tuple (inputs, targets)"


class UnfitSample(ValueError):
    """A reader has returned something that is not a sample or holds no samples; the text says what to do."""


@dataclass(frozen=True, kw_only=True)
class UserSample:
    """A sample: values by name; `roles` are the names of inputs and of targets, if the reader gives them."""

    values: Mapping[str, Value]
    split: str
    roles: Roles


@dataclass(frozen=True, kw_only=True)
class SampleStream:
    """Consecutive samples, or `items` that `read` turns into samples, in any order and in any process."""

    samples: Iterable[Any] = ()
    items: Iterable[Any] | None = None
    read: Callable[[Any], Any] | None = None
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)


def streams_of(returned: Any) -> dict[str, SampleStream]:
    """Return the streams of a reader's return value by split; UnfitSample if its type is not supported."""
    if not isinstance(returned, Mapping) or hasattr(returned, "data_vars"):
        return {UNSPLIT: _stream(returned)}
    if returned and all(hasattr(split_data, "dtype") for split_data in returned.values()):  # tables have a shape, too
        return {UNSPLIT: _rows(returned)}
    return {split_name(name): _stream(split_data) for name, split_data in returned.items()}


def split_name(name: Any) -> str:
    """Return the split that `name` means; UnfitSample if it is no valid split name."""
    text = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
    if not isinstance(text, str) or not _SPLIT.fullmatch(text):
        raise UnfitSample(f"{shown(name)} is not the name of a split; give train, val or test")
    return SPLIT_WORDS.get(text.lower(), text.lower())


def _stream(own: Any) -> SampleStream:
    if callable(getattr(own, "items", None)) and callable(getattr(own, "read", None)):
        return SampleStream(items=own.items(), read=own.read)
    if hasattr(own, "as_numpy_iterator"):
        if int(own.cardinality()) == -1:  # tf.data.INFINITE_CARDINALITY
            raise UnfitSample("the tf.data.Dataset never ends; leave out repeat()")
        return SampleStream(samples=own.as_numpy_iterator())
    if hasattr(own, "data_vars"):
        return _rows(_variables(own))
    if hasattr(own, "to_dataset") and hasattr(own, "dims"):
        return _rows(_variables(own.to_dataset(name=own.name or "x")))
    if hasattr(own, "iloc") and hasattr(own, "columns"):
        return _rows({str(name): own[name].to_numpy() for name in own.columns})
    if any(kind.__name__ == "PyDataset" for kind in type(own).__mro__):
        return SampleStream(samples=_from_batches(own))
    names = _class_names(own)
    if hasattr(own, "__getitem__") and hasattr(own, "__len__") and not isinstance(own, str | bytes | Mapping):
        return SampleStream(items=range(len(own)), read=own.__getitem__, class_names=names)
    if isinstance(own, Iterable) and not isinstance(own, str | bytes | Mapping):
        return SampleStream(samples=own, class_names=names)
    raise UnfitSample(f"it returned {_kind(own)}; {RETURNS}")


def _rows(arrays: Mapping[Any, Any]) -> SampleStream:
    """Return the stream of arrays whose first axis counts samples."""
    counts = {str(name): int(array.shape[0]) if array.shape else 0 for name, array in arrays.items()}
    if len(set(counts.values())) != 1:
        lengths = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise UnfitSample(f"the arrays hold unequal numbers of samples along their first axis ({lengths})")
    return SampleStream(
        items=range(next(iter(counts.values()))),
        read=lambda number: {str(name): array[number] for name, array in arrays.items()},
    )


def _variables(dataset: Any) -> dict[str, Any]:
    """Return the variables of an xarray Dataset; their common first dimension counts samples."""
    variables = {str(name): variable for name, variable in dataset.data_vars.items()}
    first = {str(variable.dims[0]) if variable.dims else "none" for variable in variables.values()}
    if len(first) != 1 or "none" in first:
        raise UnfitSample(
            f"the variables of the xarray Dataset begin with different dimensions ({', '.join(sorted(first))}); return "
            'those that have one value a sample, that dimension first: dataset[["a", "b"]].transpose("time", ...)'
        )
    return variables


def _class_names(own: Any) -> dict[str, list[str]]:
    """Return the class names that a Hugging Face data set stores for its columns."""
    features = getattr(own, "features", None)
    if not isinstance(features, Mapping):
        return {}
    return {str(name): list(kind.names) for name, kind in features.items() if hasattr(kind, "str2int")}


def _from_batches(dataset: Any) -> Iterator[Any]:
    """Yield the samples of a Keras PyDataset, in the order of its batches."""
    if getattr(dataset, "num_batches", 0) is None:
        raise UnfitSample("the PyDataset never ends (num_batches is None); give it a __len__")
    for number in range(len(dataset)):
        batch = dataset[number]
        lengths = {len(leaf) for leaf in _leaves(batch)}
        if len(lengths) != 1:
            raise UnfitSample(f"batch {number} of the PyDataset holds arrays of different lengths {sorted(lengths)}")
        for position in range(lengths.pop()):
            yield _cut(batch, position)


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return [leaf for branch in tree.values() for leaf in _leaves(branch)]
    if isinstance(tree, tuple):
        return [leaf for branch in tree for leaf in _leaves(branch)]
    return [tree]


def _cut(tree: Any, at: int) -> Any:
    if isinstance(tree, Mapping):
        return {name: _cut(branch, at) for name, branch in tree.items()}
    return tuple(_cut(branch, at) for branch in tree) if isinstance(tree, tuple) else tree[at]


def sample_of(thing: Any) -> UserSample:
    """Convert a sample as returned by a reader; UnfitSample says what is not supported."""
    roles: Roles = None
    if isinstance(thing, Mapping):
        values = dict(_named(thing, ""))
    elif isinstance(thing, tuple) and len(thing) == 2:
        inputs, targets = dict(_named(thing[0], "x")), dict(_named(thing[1], "y"))
        twice = sorted(inputs.keys() & targets.keys())
        if twice:
            raise UnfitSample(f"{shown(twice[0])} names an input and a target; give them different names")
        roles, values = (tuple(inputs), tuple(targets)), {**inputs, **targets}
    elif isinstance(thing, tuple) and len(thing) == 3:
        raise UnfitSample("weights of samples are not supported; give (inputs, targets), or a dict with the weights")
    else:
        raise UnfitSample(f"it is {_kind(thing)}; {_SAMPLES}")
    split = split_name(values.pop("split")) if "split" in values and roles is None else UNSPLIT
    return UserSample(values={name: value_of(name, value) for name, value in values.items()}, split=split, roles=roles)


def _named(thing: Any, name: str, *, top: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a tree by path; those of a tuple are numbered, and a single array gets the name `name`."""
    if isinstance(thing, Mapping):
        for key, branch in thing.items():
            if not isinstance(key, str):
                raise UnfitSample(f"the key {shown(key)} is not a string; {_SAMPLES}")
            yield from _named(branch, key if top else f"{name}/{key}", top=False)
    elif isinstance(thing, tuple):
        for number, branch in enumerate(thing):
            yield from _named(branch, f"{name}{number}", top=False)
    else:
        yield name, thing


def value_of(name: str, value: Any) -> Value:
    """Return a value of a sample as numbers or text; UnfitSample if it is neither."""
    if isinstance(value, str | bytes):
        try:
            text = value.encode() if isinstance(value, str) else bytes(value)
            text.decode()
        except UnicodeError as error:
            raise UnfitSample(
                f"{name} is bytes that are not text in UTF-8; decode them: numpy.frombuffer(...), PIL.Image.open(...)"
            ) from error
        return text
    if np.ma.is_masked(value):
        raise UnfitSample(f"{name} has masked values; say what they become: {name}.filled(numpy.nan)")
    if getattr(value, "mode", "") == "P" and hasattr(value, "getpalette"):
        raise UnfitSample(
            f"{name} is a picture with a palette; give numpy.asarray(picture.convert('RGB')) for its colours, or "
            "numpy.asarray(picture) for the numbers of its classes"
        )
    try:
        array = np.asarray(value)
    except Exception as error:  # np.asarray may run any library's code
        raise UnfitSample(f"{name} is {_kind(value)}, which does not become an array: {error}") from error
    only: Any = None if array.shape else array.item()
    if isinstance(only, str | bytes):
        return value_of(name, only)
    if array.dtype.newbyteorder("=").name not in DTYPES:
        described_value = _kind(value) if array.dtype.kind == "O" else f"an array of {array.dtype}"
        raise UnfitSample(f"{name} is {described_value}; a value is text or numbers, one of {', '.join(DTYPES)}")
    if min(array.shape[1:], default=1) < 1:
        raise UnfitSample(f"{name} has the shape {array.shape}; only the first axis may be empty")
    return np.asarray(array, array.dtype.newbyteorder("<"), order="C")


def item_text(item: Any) -> str:
    """Encode an item in one line for `item_of`; UnfitSample if it cannot be passed to another process."""
    return json.dumps(_plain(item))


def item_of(text: str) -> Any:
    """Decode an item written by `item_text`."""
    return _item(json.loads(text))


def _plain(item: Any) -> Any:
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if isinstance(item, np.generic):
        return _plain(item.item())
    if isinstance(item, os.PathLike):
        return {"path": os.fspath(item)}
    if isinstance(item, list):
        return [_plain(part) for part in item]
    if isinstance(item, tuple):
        return {"tuple": [_plain(part) for part in item]}
    if isinstance(item, Mapping) and all(isinstance(key, str) for key in item):
        return {"dict": {key: _plain(part) for key, part in item.items()}}
    raise UnfitSample(
        f"items() gives {_kind(item)}; an item is a path, text, a number, or a tuple, list or dict of these"
    )


def _item(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_item(content) for content in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "path":
        return Path(content)
    return tuple(map(_item, content)) if kind == "tuple" else {key: _item(part) for key, part in content.items()}


def _kind(value: Any) -> str:
    return "None (is there a `return`?)" if value is None else f"an object of type {type(value).__name__}"
