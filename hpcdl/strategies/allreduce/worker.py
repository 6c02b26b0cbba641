"""Synchronous SGD: an all-reduce averages gradients bucket by bucket, while back-propagation continues.

Each bucket is one `tf.numpy_function` in a fixed order given by control dependencies, so that every rank runs the same
collectives in the same order without negotiation. The function reduces its input in place and returns it: a gradient
that is a bucket of its own is overwritten. The loss is divided by the number of workers before back-propagation, so
that the sum of the gradients is their mean. This saves a pass over all gradients, and avoids overflow in half
precision.

A bucket's weights are updated as soon as its sum has arrived and all ranks know that all gradients are finite. Only
their own weights wait for the other buckets (docs/decisions/0140-updates-while-buckets-travel.md).
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import tensorflow as tf

from hpcdl.collectives import recursive_doubling
from hpcdl.collectives.slices import Workspace, plan_buckets, unseen
from hpcdl.collectives.table import COLLECTIVES
from hpcdl.comm.arithmetic import float16_scale
from hpcdl.comm.observed import NOTHING, recorder_of
from hpcdl.core.errors import UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.core.units import format_bytes
from hpcdl.strategies.allreduce.compression import WIRES, Wire, largest_magnitude, warnings_of, wire_of
from hpcdl.strategies.allreduce.rest import BucketPart
from hpcdl.strategies.base.graph import (
    SAMPLED,
    FiniteGuard,
    behind,
    bounds_of,
    bucket_recorded,
    call_python,
    timestamp,
    timestamp_beside,
    update_recorded,
)
from hpcdl.strategies.base.strategy import Context, Server, Worker

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array, Finished


ALIGNMENT = 64
"""Bytes: TensorFlow's own tensors begin on multiples of this, or of a divisor of it."""
LARGE_BYTES = 64 << 10
"""Copying a smaller tensor costs less than an operation of its own."""


class AllReduce:
    """Every all-reduce of collectives/ as a strategy of the same name."""

    def worker(self, context: Context) -> Worker:
        """Return the worker: all ranks are workers."""
        return AllReduceWorker(context)

    def server(self, context: Context) -> Server:
        """Fail: there are no servers."""
        raise AssertionError("an all-reduce has no servers")


class AllReduceWorker(Worker):
    """Averages gradients over the ranks, then applies them with the local optimizer.

    A step is traced with the current `bucket_bytes`.
    """

    def __init__(self, context: Context) -> None:
        # A separate communicator: the exchange runs on TensorFlow's threads, parallel to the main thread's messages.
        self._communicator = context.communicator.duplicate()
        self.bucket_bytes = context.exchange.bucket_bytes
        self._in_place = context.in_place
        self._wire = wire_of(context.exchange.compress, repeatable=context.in_place)
        self._compress = context.exchange.compress
        self._asked = f"--compress {self._compress}"
        """The setting's name in messages."""
        self.warnings = warnings_of(self._compress, self._communicator.size)
        self._collective = self._collective_of(context)
        # `auto` chooses by measured times, and another all-reduce rounds differently.
        self._workspace = Workspace(measure=not context.deterministic)
        self.loss_share = 1 / self._communicator.size
        group = self._communicator if self._communicator.size > 1 else None
        self._guard = FiniteGuard(self._communicator.rank, group)

    def _collective_of(self, context: Context) -> Any:
        """Return the module that has `allreduce`."""
        return importlib.import_module(COLLECTIVES.entry(context.info.name).target.partition(":")[0])

    def start(self, variables: Sequence[Any]) -> None:
        """Broadcast rank 0's weights to all ranks."""
        broadcast_variables(self._communicator, variables)

    def before_step(self, step: int) -> None:
        """Store the step for error messages."""
        self._guard.step = step

    def after_step(self, step: int) -> None:
        """Settle the rests of compression."""
        if self._wire.feedback is not None:
            self._wire.feedback.settle()

    def state(self) -> dict[str, Array]:
        """Return the state of compression; empty without it."""
        return {} if self._wire.feedback is None else self._wire.feedback.state()

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Restore the state of compression."""
        if self._wire.feedback is not None:
            self._wire.feedback.restore(arrays)

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any], optimizer: Any) -> Any:
        """Average the gradients in buckets, and apply each as soon as its sum has arrived and may be applied."""
        names = [variable.path for variable in variables]
        if self._moves_early(gradients):
            averaged, agreed, suspicious = self._sum_up_agreed(gradients, names)
            # The flag of the last bucket: it exists once all sums have arrived.
            with tf.control_dependencies([suspicious]):
                exchanged = timestamp()
            with tf.control_dependencies([agreed]):  # weight decay waits for no gradient
                self.averaged = [tf.identity(gradient) for gradient in averaged]
                optimizer.apply(averaged, variables)
            with tf.control_dependencies([exchanged]):
                sound = self._guard.unspoilt(suspicious)
            # The result depends on the check, so that no step ends before it.
            with tf.control_dependencies([sound]):
                exchanged = tf.identity(exchanged)
            return self._updates_recorded(averaged, agreed, variables, exchanged)
        summed, ready = self._sum_up_checked(gradients, names, self.bucket_bytes)
        with tf.control_dependencies(ready):
            exchanged = timestamp()
        with tf.control_dependencies([exchanged]):
            optimizer.apply(summed, variables)
        return exchanged

    def leaves_early(self, gradients: Sequence[Any]) -> bool:
        """Whether there are several buckets."""
        return self._communicator.size > 1 and len(list(self._plan(gradients, self.bucket_bytes))) > 1

    def buckets(self, gradients: Sequence[Any], bucket_bytes: int) -> tuple[tuple[int, ...], ...]:
        """Return which of `gradients` would share a bucket if buckets had this size."""
        return tuple(tuple(bucket) for bucket, _ in self._plan(gradients, bucket_bytes))

    def sum_up(self, gradients: Sequence[Any], names: Sequence[str], bucket_bytes: int | None = None) -> list[Any]:
        """Return the sums of `gradients` over the ranks, in order; traced into the graph. `names`: the variables'.

        `bucket_bytes`, if given, replaces the configured bucket size.
        """
        averaged, ready = self._sum_up_checked(gradients, names, bucket_bytes or self.bucket_bytes)
        return behind(ready, averaged)

    def _sum_up_checked(
        self, gradients: Sequence[Any], names: Sequence[str], bucket_bytes: int
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the sums, and the tensors to wait for before the sums are used."""
        if self._communicator.size == 1:
            return gradients, [self._guard.before_exchange(gradients, names)] if self.checks_finite else gradients
        averaged, suspicious = self._exchange(gradients, self._plan(gradients, bucket_bytes), names)
        sound = self._guard.verdict(suspicious, gradients, names) if self.checks_finite else suspicious
        return averaged, [sound]

    def _moves_early(self, gradients: Sequence[Any]) -> bool:
        """Whether weights may be updated while buckets travel: there are several, and the ranks can agree early.

        An optimizer that skips steps (`checks_finite` is False) must see all sums before it updates anything. A step
        that may be repeated must not update only a part of the weights.
        """
        if self._communicator.size == 1 or not self.checks_finite or self._in_place:
            return False
        # The bound by squares holds for float32 only, see SQUARED_BOUND.
        return all(gradient.dtype == tf.float32 for gradient in gradients) and self.leaves_early(gradients)

    def _sum_up_agreed(self, gradients: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], Any, Any]:
        """Return the sums, the operation after which each sum may be used, and whether to check them again.

        The operation is an agreement of the ranks, before the bucket of the first variable is sent. Back-propagation
        computes that variable's gradient last, so checking by then that all gradients are finite delays no bucket.
        """
        plan = list(self._plan(gradients, self.bucket_bytes))
        bounds = [bounds_of([gradients[index] for index in bucket]) for bucket, _ in plan]
        made_last = next(number for number, (bucket, _) in enumerate(plan) if 0 in bucket)
        sent = [index for bucket, _ in plan for index in bucket]
        agreed: list[Any] = []

        def before(number: int) -> list[Any]:
            if number == made_last:
                # Bounds are in sending order, names in the order of the variables.
                in_order = tf.gather(tf.concat(bounds, 0), numpy.argsort(sent))
                agreed.append(self._guard.agreed(in_order, names, self._total))
            return [bounds[number], *agreed]  # the bound first: the exchange overwrites the gradients

        averaged, suspicious = self._exchange(gradients, plan, before=before)
        return averaged, agreed[0], suspicious

    def _updates_recorded(self, averaged: Sequence[Any], agreed: Any, variables: Sequence[Any], result: Any) -> Any:
        """Return `result`; if the run is traced, record a span of each bucket's update."""
        recorder = recorder_of(self._communicator)
        if recorder is NOTHING:
            return result
        for number, (bucket, _) in enumerate(self._plan(averaged, self.bucket_bytes)):
            began = timestamp_beside(tf.cast(agreed, tf.float32), [averaged[index] for index in bucket])
            result += update_recorded(recorder, number, began, [variables[index] for index in bucket])
        return result

    def _total(self, buffer: Array) -> None:
        """Sum a few numbers over the ranks in place."""
        recursive_doubling.allreduce(self._communicator, buffer, self._workspace)

    def _exchange(
        self,
        gradients: Sequence[Any],
        plan: Iterable[tuple[list[int], Wire]],
        names: Sequence[str] = (),
        before: Callable[[int], list[Any]] = lambda number: [],
    ) -> tuple[list[Any], Any]:
        """Return the sums of the gradients, bucket by bucket in the order of `plan`, and whether to check them again.

        `names`: the variables', needed to name those whose gradients were not finite before they were overwritten.
        `before` a bucket: what it waits for besides the previous bucket.
        """
        summed: list[Any] = [None] * len(gradients)
        previous: list[Any] = []
        earlier: list[Any] = []
        for number, (bucket, wire) in enumerate(plan):
            of_bucket = [gradients[index] for index in bucket]
            with tf.control_dependencies(earlier):  # at most one is packed ahead, to save memory
                flat = packed(of_bucket)
            earlier = previous
            with tf.control_dependencies(previous):
                previous = [*previous, *before(number)]
            with tf.control_dependencies(previous):
                scale_of = self._scaler(number) if wire.scaled else None
                # A 16-bit format is encoded into a copy: then the gradient itself survives the exchange.
                alone = names[bucket[0]] if names and len(bucket) == 1 and wire.exponent is None else ""
                # Otherwise the sum for the scale was first, and its finding must not be cleared.
                first = number == 0 and scale_of is None
                reducer = self._reducer(number, wire, first, alone, pieces_of(bucket, of_bucket))
                reduced, suspicious = exchange_bucket(flat, of_bucket, reducer, wire, scale_of)
            previous = [suspicious]
            for index, tensor in zip(bucket, reduced, strict=True):
                summed[index] = tensor
        return summed, suspicious

    def details(self) -> dict[str, Any]:
        """Return the all-reduce that `auto` chose for each size: equally fast ones may differ from run to run."""
        chosen = self._workspace.chosen
        return {"allreduces": {format_bytes(size): chosen[size] for size in sorted(chosen)}} if chosen else {}

    def finish(self, *, early: bool = False) -> None:
        """Free scratch buffers and sub-communicators."""
        self._workspace.close()

    def _plan(self, gradients: Sequence[Any], bucket_bytes: int) -> Iterator[tuple[list[int], Wire]]:
        """Yield buckets of one type in sending order, with the format of each; compressed ones first."""
        plain = WIRES["none"]
        if self._wire.feedback is not None:
            check_compressed(self._asked, self._wire, gradients)
        kinds = [
            (self._wire if self._wire.carries(gradient.shape) else plain, gradient.dtype) for gradient in gradients
        ]
        # Not a set, whose order may differ between ranks: then they would exchange different buckets.
        for kind in sorted(dict.fromkeys(kinds), key=lambda kind: kind[0] is not self._wire):
            group = [index for index, other_kind in enumerate(kinds) if other_kind == kind]
            sizes = [kind[1].size * gradients[index].shape.num_elements() for index in group]
            for bucket in plan_buckets(sizes, bucket_bytes, small_first=True):
                yield [group[position] for position in bucket], kind[0]

    def _reducer(
        self, number: int, wire: Wire, first: bool, alone: str = "", pieces: Sequence[BucketPart] = ()
    ) -> Callable[[Array], tuple[Array, bool]]:
        """Return a function that exchanges a bucket in place; it also returns whether sums since `first` need a check.

        `alone`: the variable whose gradient is the buffer itself. `pieces`: each gradient's position in it.
        """
        communicator, feedback = self._communicator, wire.feedback

        def add_up(buffer: Array) -> None:
            self._collective.allreduce(communicator, buffer, self._workspace)

        def reduce(buffer: Array, finished: Finished) -> Array:
            if feedback is None:
                self._collective.allreduce(communicator, buffer, self._workspace, wire.add, finished)
            else:
                feedback.exchange(buffer, pieces, communicator, add_up)
                # A compressed sum is complete only now, so nothing could be checked while other parts travelled.
                finished(buffer)
            return buffer

        sent_bytes = None if feedback is None else feedback.form.num_bytes(pieces, communicator.size)
        recorded = bucket_recorded(reduce, recorder_of(communicator), number, sent_bytes)
        if not self.checks_finite:
            return lambda buffer: (recorded(buffer, unseen), False)
        # What spoils one value of a plain sum tends to spoil all values; of a compressed sum one block, or one value.
        sampled = SAMPLED if feedback is None else 1
        return self._guard.watched(recorded, first=first, alone=alone, exponent=wire.exponent, sampled=sampled)

    def _scaler(self, number: int) -> Callable[[Any], Any]:
        reduce = self._reducer(number, WIRES["none"], first=number == 0)

        def scale(flat: Any) -> Any:
            largest = largest_magnitude(flat)
            return call_python(lambda largest_here: float16_scale(reduce(largest_here)[0]), [largest], largest.dtype)

        return scale


def check_compressed(asked: str, wire: Wire, gradients: Sequence[Any]) -> None:
    """Raise UsageError if the compression applies to no gradient, or to one that is not float32."""
    compressed = [gradient for gradient in gradients if wire.carries(gradient.shape)]
    if not compressed:
        raise UsageError(f"{asked}: no gradient of this model gets smaller by it; leave it out")
    odd_types = sorted({gradient.dtype.name for gradient in compressed} - {"float32"})
    if odd_types:
        raise UsageError(
            f"{asked}: it takes gradients of float32, the model has {', '.join(odd_types)} ones; "
            "use fp16 or bf16, or leave it out"
        )


def packed(tensors: Sequence[Any]) -> Any:
    """Return all tensors as one flat tensor, in `packed_order`; a single one is not copied."""
    pieces = [flattened(tensors[position]) for position in packed_order(tensors)]
    return tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]


def exchange_bucket(
    flat: Any,
    tensors: Sequence[Any],
    reduce: Callable[[Array], tuple[Array, bool]],
    wire: Wire = WIRES["none"],
    scale_of: Callable[[Any], Any] | None = None,
) -> tuple[list[Any], Any]:
    """Send `flat`, which is `packed` of `tensors`, through `reduce`: return the sums in the shapes of `tensors`.

    `scale_of`, if given, returns the factor for the buffer on the wire. Also returns the flag from `reduce`.
    """
    order = packed_order(tensors)
    scale = scale_of(flat) if scale_of else None
    sent = wire.encode(flat if scale is None else flat * scale)
    received, suspicious = call_python(reduce, [sent], [sent.dtype, tf.bool])
    received = wire.decode(received, flat.dtype)
    received = received if scale is None else received / scale
    received.set_shape([sum(tensor.shape.num_elements() for tensor in tensors)])  # numpy_function loses the shape
    parts = dict(zip(order, unpacked(received, [tensors[position] for position in order]), strict=True))
    return [parts[position] for position in range(len(tensors))], tf.ensure_shape(suspicious, [])


def pieces_of(bucket: Sequence[int], tensors: Sequence[Any]) -> list[BucketPart]:
    """Return the position of each of `tensors`, the gradients of the variables `bucket`, in their bucket."""
    order = packed_order(tensors)
    shapes = [tuple(tensors[position].shape) for position in order]
    # One more start than shapes: the end of the last one.
    starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [
        BucketPart(variable=bucket[position], start=start, shape=shape)
        for position, start, shape in zip(order, starts, shapes, strict=False)
    ]


def packed_order(tensors: Sequence[Any]) -> list[int]:
    """Return the order of `tensors` in their bucket: first those that can be used without a copy (`unpacked`)."""
    # `sorted` is stable, so every rank packs in the same order.
    return sorted(range(len(tensors)), key=lambda index: not _stays(tensors[index]))


def unpacked(flat: Any, tensors: Sequence[Any]) -> list[Any]:
    """Return the parts of `flat` in the shapes of `tensors`, which are in `packed_order`.

    TensorFlow's split copies each part; its slice does not if a part begins and ends at a multiple of ALIGNMENT.
    """
    lengths = [tensor.shape.num_elements() for tensor in tensors]
    if len(tensors) == 1:
        parts = [flat]
    elif any(map(_stays, tensors)):
        # One more start than lengths: the end of the last one.
        starts = itertools.accumulate(lengths, initial=0)
        parts = [tf.slice(flat, [start], [length]) for start, length in zip(starts, lengths, strict=False)]
    else:
        parts = tf.split(flat, lengths)
    return [shaped(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def _stays(tensor: Any) -> bool:
    num_bytes = tensor.shape.num_elements() * tensor.dtype.size
    return bool(num_bytes >= LARGE_BYTES and num_bytes % ALIGNMENT == 0)


def flattened(tensor: Any) -> Any:
    """Return `tensor` in one dimension; without an operation if it has one already."""
    return tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1])


def shaped(flat: Any, shape: Any) -> Any:
    """Return `flat` in `shape`; without an operation if the shape has one dimension."""
    return flat if shape.rank == 1 else tf.reshape(flat, shape)


def broadcast_variables(communicator: Communicator, variables: Sequence[Any], root: int = 0) -> None:
    """Give every rank the root's values of `variables`."""
    for variable in variables:
        # The array may share the variable's memory, which a broadcast must not write to.
        value = numpy.asarray(variable.numpy()).copy()
        communicator.broadcast(value, root)
        if communicator.rank != root:
            variable.assign(value)
