"""Puts a replica into the training step: gradients go in as one flat buffer, new weights come out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.comm.observed import BUCKET, recorder_of
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.processes.wall import WALL
from hpcdl.strategies.allreduce.worker import broadcast_variables
from hpcdl.strategies.base.graph import call_python
from hpcdl.strategies.base.strategy import Worker
from hpcdl.strategies.elastic.replica import Replica

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array
    from hpcdl.strategies.base.salvage import Center, CenterPart


def one_buffer(tensors: Sequence[Any]) -> Any:
    """Return `tensors` concatenated into one flat tensor."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def assign_pieces(variables: Sequence[Any], weights: Any) -> None:
    """Assign to `variables` their consecutive parts of the flat `weights`; traced into the graph."""
    lengths = [int(numpy.prod(variable.shape)) for variable in variables]
    weights.set_shape([sum(lengths)])
    pieces = tf.split(weights, lengths)
    for variable, piece in zip(variables, pieces, strict=True):
        # A single piece is the replica's own buffer: the variable must not share it.
        variable.assign(tf.reshape(piece if len(pieces) > 1 else piece + 0.0, variable.shape))


def unpacked(flat: Array, shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    """Return the consecutive arrays of these `shapes` in `flat`, as views."""
    arrays, start = [], 0
    for shape in shapes:
        length = int(numpy.prod(shape))
        arrays.append(flat[start : start + length].reshape(shape))
        start += length
    return arrays


class FlatWorker(Worker):
    """A worker whose weights are in `replica`; the model's variables are copied from it after each step."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.learning_rate = replica.learning_rate
        self.warnings = replica.warnings
        self._shapes: list[tuple[int, ...]] = []
        self._trainable: list[Any] = []

    def start(self, variables: Sequence[Any]) -> None:
        """Broadcast rank 0's weights, which also become the center; a resumed worker then restores its own."""
        broadcast_variables(self.replica.group, variables)
        self._trainable = [variable for variable in variables if variable.trainable]
        values = [numpy.array(variable) for variable in self._trainable]
        odd_types = {str(value.dtype) for value in values} - {"float32"}
        if odd_types:
            raise UsageError(
                f"strategy {self.replica.context.info.name!r} keeps its weights in float32, the model has "
                f"{', '.join(sorted(odd_types))} ones; use --strategy ring"
            )
        self._shapes = [value.shape for value in values]
        flat = numpy.concatenate([value.reshape(-1) for value in values])
        self.replica.variables = [(item.path, value.size) for item, value in zip(self._trainable, values, strict=True)]
        self.replica.start(flat, [value.size for value in values])
        for variable, value in zip(self._trainable, self._unpacked(self.replica.weights), strict=True):
            variable.assign(value)

    def before_step(self, step: int) -> None:
        """Begin an exchange that needs no gradient."""
        self.replica.learning_rate, self.replica.step_now = self.learning_rate, step
        self.replica.before_step(step)

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Call the replica once for all variables together."""
        if [id(variable) for variable in variables] != [id(variable) for variable in self._trainable]:
            raise HpcdlError("the model's trainable variables changed after the start; freeze layers before training")
        weights, exchanged = call_python(self._step, [one_buffer(gradients)], [tf.float32, tf.float64])
        assign_pieces(variables, weights)
        # Keras's optimizer is never called, but schedules and records read its step count.
        optimizer.iterations.assign_add(1)
        return tf.ensure_shape(exchanged, [])

    def after_step(self, step: int) -> None:
        """Copy the waiting time of the exchange."""
        self.waited_s = self.replica.waited_s

    def state(self) -> dict[str, Array]:
        """Return this worker's own weights."""
        return self.replica.state()

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore this worker's own weights."""
        self.replica.restore(arrays)

    def abandon(self) -> None:
        """Abandon the replica's operations."""
        self.replica.abandon()

    def kept(self) -> dict[str, Array]:
        """Return the replica's own state."""
        return self.replica.kept()

    def part(self) -> CenterPart | None:
        """Return the replica's copy of the center."""
        return self.replica.part()

    def take_center(self, center: Center) -> None:
        """Continue from `center`."""
        self.replica.take_center(center)

    def details(self) -> dict[str, Any]:
        """Return this worker's details for the record."""
        return self.replica.details()

    def center(self) -> list[Array] | None:
        """Return the center, variable by variable; None before the start, when the model's variables hold it."""
        if not self.replica.weights.size:
            return None
        return self._unpacked(self.replica.center())

    def finish(self, *, early: bool = False) -> None:
        """Leave the center in order."""
        self.replica.finish(early=early)

    def _step(self, gradient: Array) -> tuple[Array, float]:
        began_s, began = time.monotonic(), WALL.now_s()
        weights, exchanged = self.replica.step(gradient)
        # The replica returns a Unix time; the span is on the monotonic clock.
        took_s = exchanged - began
        recorder = recorder_of(self.replica.group)
        recorder.span(BUCKET, began_s, began_s + took_s, num_bytes=gradient.nbytes, bucket=0)
        return weights, numpy.float64(exchanged)

    def _unpacked(self, flat: Array) -> list[Array]:
        return unpacked(flat, self._shapes)
