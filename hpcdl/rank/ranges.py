"""Whether a trained model is fed numbers of the range that it was trained on, judged by one batch of each data set."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import HpcdlError
from hpcdl.data.format.dataset import Dataset, Split
from hpcdl.data.read.pipeline import evaluation_batches
from hpcdl.step.preprocess import preprocessed
from hpcdl.step.step import as_model_input

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

_SAMPLES = 32
"""Samples of the training data that are looked at."""
_VALUES = 1 << 20
"""Most values of an input that are looked at."""
_FEW = 200
"""Fewer values than this say nothing about their signs."""
_DISTINCT = 8
"""A column of fewer distinct values, such as a flag, has no range to leave."""
_RATIO = 20.0
"""Numbers so many times smaller than in training are of another unit, and no darker picture."""


def other_ranges(trained: Dataset, config: TrainConfig, given: Dataset, inputs: Any) -> list[str]:
    """Return a question for each input that is of another range than in the data `trained`.

    `inputs` is a batch of `given` as the model is fed it; one of the training data is read and processed alike.
    """
    learned = _inputs_in_training(trained, config)
    if learned is None:
        return other_types(given, trained)
    names = sorted(inputs) if isinstance(inputs, Mapping) else [field.name for field in given.inputs]
    pairs = zip(_fed(inputs), _fed(learned), strict=False)
    differences = [
        (name, difference(_values(new), _values(old), _columns(given, name)))
        for name, (new, old) in zip(names, pairs, strict=False)
        if new is not None and old is not None and new.shape[1:] == old.shape[1:]
    ]
    return [
        f"{name!r} of {given.name} {text} in the data that the model was trained on: are both scaled alike?"
        for name, text in differences
        if text
    ]


def first_inputs(dataset: Dataset, split: Split, batch_size: int) -> Any:
    """Return the inputs of the first batch of `split` as a model is fed them."""
    batches = evaluation_batches(dataset, split, batch_size=batch_size, firsts=[0])
    try:
        return next(batches)[0]
    finally:
        batches.close()


def _inputs_in_training(trained: Dataset, config: TrainConfig) -> Any:
    """Return inputs of the training data as the model was fed them; None if no sample can be read any more."""
    if trained.folder is not None or trained.synthetic is not None:
        with contextlib.suppress(HpcdlError, OSError, tf.errors.OpError):
            size = min(_SAMPLES, config.data.batch_size)
            return first_inputs(preprocessed(trained, config.data), trained.train_split, size)
    return None


def other_types(given: Dataset, trained: Dataset) -> list[str]:
    """Ask about bytes in one data set and other numbers in the other, where no sample tells their ranges."""
    types = {field.name: field.dtype for field in trained.inputs}
    return [
        f"{field.name!r} of {given.name} holds {field.dtype}, and {types[field.name]} in {trained.name}: training "
        "scales bytes of pictures alone; are both in the same range?"
        for field in given.inputs
        if field.name in types and (field.dtype == "uint8") != (types[field.name] == "uint8")
    ]


def _fed(inputs: Any) -> list[Any]:
    """Return each input as the model takes it; None for whole numbers, such as words, which have no range."""
    return [
        as_model_input(tensor) if tensor.dtype.is_floating or tensor.dtype == tf.uint8 else None
        for tensor in tf.nest.flatten(inputs)
    ]


def _values(batch: Any) -> Array:
    """Return a batch as an array of (samples, values per sample), with fewer samples if they are large."""
    array: Array = batch.numpy()
    rows = array.reshape(len(array), -1)
    return rows[: max(1, _VALUES // max(1, rows.shape[1])), :_VALUES].astype(np.float64)


def _columns(given: Dataset, name: str) -> Sequence[str]:
    return next((field.columns for field in given.inputs if field.name == name), ())


def difference(new: Array, old: Array, columns: Sequence[str]) -> str:
    """Describe how the values of `new` leave the range of `old`; empty if they do not."""
    first, second = new[np.isfinite(new)], old[np.isfinite(old)]
    if not len(first) or not len(second) or second.min() == second.max():
        return ""
    low, high = second.min(), second.max()
    margin = (high - low) / 2
    outside = np.mean((first < low - margin) | (first > high + margin)) > 0.05
    smaller = _size(second) > _RATIO * _size(first) > 0
    unsigned = min(len(first), len(second)) >= _FEW and first.min() >= 0 and np.mean(second < 0) > 0.1
    if outside or smaller or unsigned:
        return f"goes from {first.min():.3g} to {first.max():.3g}, and from {low:.3g} to {high:.3g}"
    return next(_far_columns(new, old, columns), "")


def _size(values: Array) -> float:
    """Return the size of the larger values that are not zero; sparse data hold few of them."""
    sizes = np.abs(values[values != 0])
    return float(np.percentile(sizes, 99)) if len(sizes) else 0.0


def _far_columns(new: Array, old: Array, columns: Sequence[str]) -> Iterator[str]:
    """Describe each column of a table whose median is far from all values of `old`."""
    if len(columns) != old.shape[1]:
        return
    for name, first, second in zip(columns, new.T, old.T, strict=True):
        low, high = second.min(), second.max()
        middle = np.median(first)
        margin = 3 * (high - low)
        if len(np.unique(second)) >= _DISTINCT and not low - margin <= middle <= high + margin:
            yield f"has {name} about {middle:.3g}, and {low:.3g} to {high:.3g}"
