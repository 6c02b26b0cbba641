"""Warn of losses that add up a batch's samples in a loop of the script's own.

In a graph they are found as in `batch_sums`. Without one, back-propagation passes by a sum, and its gradient there is
the reciprocal of what divides the sum. It also passes by the product of a batch with itself that compares its samples.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.scripts.fit.batch_mixes import COMPARES, ROUNDING
from hpcdl.scripts.fit.batch_sums import has_variables, look_at, warn_of_sum
from hpcdl.scripts.process.session import warn_once

if TYPE_CHECKING:
    from hpcdl.scripts.process.group import ScriptGroup

_WHAT = "a loss in a loop"
_FEW = 2
"""A divisor of 2 may also be the number of so few samples."""
_MOST_LOOKS = 8
"""Eager updates whose losses are looked at."""
_MOST_NOTED = 100
"""Losses and sums that are kept: no update may follow them."""


class LoopSums:
    """Looks at the losses whose gradients the ranks average, of graphs when they are traced."""

    def __init__(self, group: ScriptGroup) -> None:
        self._group = group
        self._num_looks = _MOST_LOOKS
        self._matched: set[int] = set()
        """Numbers of samples of the eager batches that were added up."""

    @property
    def looks(self) -> bool:
        """Whether losses are still noted for this object."""
        return id(self) in _lookers

    def begin(self) -> None:
        """Have the losses of tapes noted, as long as this object looks at them."""
        if self._num_looks:
            _lookers[id(self)] = self
            _note_losses()

    def look(self, rows: Any) -> None:
        """Look at the losses derived since the last call. `rows`: a tensor of the last batch, None if unknown."""
        losses, sums, products = _derived[:], _passed[:], _products[:]
        for noted in (_derived, _passed, _products):
            noted.clear()
        if rows is None:
            return
        if not tf.executing_eagerly():
            look_at(self._group, _WHAT, losses, rows)
            return
        number = int(rows.shape[0])
        if self._num_looks and number > _FEW and any(product % number == 0 for product in products):
            warn_once(self._group, text := f"{_WHAT} {COMPARES}", text)
        if sums and self._num_looks:
            self._num_looks -= 1
            self._judge(int(rows.shape[0]), {abs(1 / slope) for length, slope in sums if length == number})
            if not self._num_looks:
                _lookers.pop(id(self), None)

    def _judge(self, number: int, divisors: set[float]) -> None:
        """Warn if two batches of `number` samples were added up."""
        # Any other divisor may be a number that the batch has, such as that of its words.
        plain = [1.0, 2.0, float(number * self._group.size)]
        if number > _FEW and any(math.isclose(one, other, rel_tol=ROUNDING) for one in divisors for other in plain):
            if number in self._matched:
                self._num_looks = 0
                warn_of_sum(self._group, _WHAT)
            self._matched.add(number)


_lookers: dict[int, LoopSums] = {}
_derived: list[Any] = []
"""The losses by which tapes have derived variables in graphs since the last update."""
_passed: list[tuple[int, float]] = []
"""The sums that eager tapes have passed since then: how many rows were added up, the gradient by the sum."""
_products: list[int] = []
"""The numbers of rows that eager tapes have passed since then, each multiplied with as many others."""


def _note_losses() -> None:
    """Patch tapes to note losses, as long as any are looked at."""
    plain = tf.GradientTape.gradient
    if hasattr(plain, "notes_losses"):
        return

    @functools.wraps(plain)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        if not _lookers or not has_variables(sources):
            return plain(self, target, sources, *args, **kwargs)
        if not tf.executing_eagerly():
            _derived[:] = [*_derived, *tf.nest.flatten(target)][-_MOST_NOTED:]
            return plain(self, target, sources, *args, **kwargs)
        # A sum of what has the shape of a weight may be a penalty on it.
        weights = {tuple(one.shape) for one in self.watched_variables() if one.shape.rank is not None}
        with _sums_noted(weights):
            gradients = plain(self, target, sources, *args, **kwargs)
        # A tape adds up what it derives.
        _passed.extend((one.shape[0], 1.0) for one in tf.nest.flatten(target) if getattr(one, "ndim", 0))
        del _passed[:-_MOST_NOTED]
        return gradients

    vars(gradient).update(notes_losses=True, autograph_info__={})  # the second is TensorFlow's mark: see batch_sums
    tf.GradientTape.gradient = gradient


@contextlib.contextmanager
def _sums_noted(weights: set[tuple[int, ...]]) -> Iterator[None]:
    """Note sums to one number, and products, that back-propagation passes here, but those of shapes of `weights`."""
    ops = importlib.import_module("tensorflow.python.framework.ops")
    known = getattr(ops.gradient_registry, "_registry", {})  # TensorFlow's functions of gradients
    notes = {"Sum": _note_sum, "MatMul": _note_product}
    plain = {name: known[name]["type"] for name in notes if "type" in known.get(name, {})}  # none: another TensorFlow

    def noting(name: str, operation: Any, slope: Any) -> Any:
        if tf.executing_eagerly():
            notes[name](operation, slope, weights)
        return plain[name](operation, slope)

    for name in plain:
        known[name]["type"] = functools.partial(noting, name)
    try:
        yield
    finally:
        for name, function in plain.items():
            known[name]["type"] = function


def _note_sum(operation: Any, slope: Any, weights: set[tuple[int, ...]]) -> None:
    if slope.shape.rank == 0 and slope.dtype.is_floating and float(slope):
        shape = tuple(operation.inputs[0].shape)
        if shape and shape not in weights:
            _passed.append((shape[0], float(slope)))


def _note_product(operation: Any, slope: Any, weights: set[tuple[int, ...]]) -> None:
    """Note a product of as many rows with as many others, if both are derived: that with a weight has its shape."""
    shapes = [tuple(one.shape) for one in operation.inputs]
    if getattr(operation, "skip_input_indices", None) or operation.get_attr("transpose_a"):
        return
    if weights.isdisjoint([*shapes, *(shape[::-1] for shape in shapes)]) and shapes[0][:1] * 2 == tuple(slope.shape):
        _products.append(shapes[0][0])
        del _products[:-_MOST_NOTED]
