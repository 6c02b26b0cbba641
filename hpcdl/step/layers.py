"""Times of each layer's input, gradients and new weights, for traces at level `full`.

A time stamp is one operation of TensorFlow, about half a microsecond. The step returns all of them, and Python stores
them after the step: a Python function in the graph costs a quarter of a millisecond. No operation of the step waits for
a stamp, and stamps are created last in the graph, so they change no results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hpcdl.comm.observed import BACKWARD, FORWARD, LAYER_UPDATE, Recorder
from hpcdl.core.errors import carried
from hpcdl.core.processes.wall import WALL
from hpcdl.step.keras_internals import layers_in
from hpcdl.strategies.base.graph import call_python, has_own_clock, timestamp_beside

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array


def layer_of(path: str) -> str:
    """Return the layer that owns the variable with that path."""
    return path.rpartition("/")[0] or path


class NoLayers:
    """Records nothing: the trace does not ask for layers."""

    def called(self, model: Any) -> AbstractContextManager[None]:
        """Inside, the layers of `model` are called."""
        return nullcontext()

    def recorded(
        self,
        exchanged: Any,
        loss: Any,
        gradients: Sequence[Any],
        averaged: Sequence[Any],
        variables: Sequence[Any],
    ) -> Sequence[Any]:
        """Return extra results of the step, for `keeping`.

        `exchanged` (scalar float64) is the time at the end of the exchange, `loss` a scalar. `averaged` are the
        gradients for the update, if each weight is updated as soon as its own is available.
        """
        return ()

    def keeping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step` without its last results, those from `recorded`."""
        return step

    def gradients_recorded(self, gradients: Sequence[Any], after: Sequence[Any]) -> None:
        """Record only the `gradients`, of a step that other code builds; stored when `after` are available."""


@dataclass(frozen=True, kw_only=True)
class _Call:
    """A call of a layer with weights, with its input and output tensors."""

    layer: str
    inputs: Sequence[Any]
    outputs: Sequence[Any]

    @property
    def made_by(self) -> set[str]:
        """The names of the operations that made the outputs."""
        return {tensor.op.name for tensor in self.outputs}


class Layers(NoLayers):
    """Records the layers that own the variables of the given paths.

    Forward, a layer lasts from its input to the input of the next layer, which must depend on its output. Parallel
    layers and layers called several times are therefore not recorded. Backward, it lasts from the previous layer's
    gradients to its own.
    """

    def __init__(self, recorder: Recorder, paths: Sequence[str]) -> None:
        self._recorder = recorder
        self._members: dict[str, list[int]] = {}
        for index, path in enumerate(paths):
            self._members.setdefault(layer_of(path), []).append(index)
        self._calls: list[_Call] = []
        self._visible: list[bool] = []
        self._kept_s = WALL.now_s()

    @contextmanager
    def called(self, model: Any) -> Iterator[None]:
        """Inside, record calls of layers; if a batch is divided into slices, the last slice counts."""
        self._calls = []
        layers = [layer for layer in layers_in(model) if layer is not model and layer.trainable_variables]
        # A `call` in the instance is the user's own, which the deletion below would remove.
        noted = [layer for layer in layers if "call" not in vars(layer)]
        for layer in noted:
            # Bypasses Keras's __setattr__, which passes each value to its tracker.
            object.__setattr__(layer, "call", self._noted(layer, layer.call))
        try:
            yield
        finally:
            for layer in noted:
                object.__delattr__(layer, "call")

    def recorded(
        self,
        exchanged: Any,
        loss: Any,
        gradients: Sequence[Any],
        averaged: Sequence[Any],
        variables: Sequence[Any],
    ) -> Sequence[Any]:
        """Return the time stamps (float64, of `timestamp`), and the small tensors that they wait for."""
        calls = self._calls
        way = [*(call.inputs for call in calls), *(call.outputs for call in calls[-1:])]
        marks = [[_mark(tensor) for tensor in tensors] for tensors in way]
        followed = [_follows(call, tensors, calls) for call, tensors in zip(calls, way[1:], strict=True)]
        self._visible = [ahead and self._is_alone(call) for call, ahead in zip(calls, followed, strict=True)]
        value = tf.cast(loss, tf.float32)
        ready = self._each(value, gradients)
        begins = self._each(value, averaged) if averaged else [exchanged] * len(self._members)
        # A weight has changed when a read after its update completes.
        ends = self._each(value, [variable.value.read_value() for variable in variables])
        moments = tf.stack([*(_moment(mark[0], mark) for mark in marks), *ready, *begins, *ends])
        return moments, *itertools.chain(*marks)

    def keeping(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `step` without its stamps, stored after it, or by a Python function in a graph of several steps."""

        def keep(moments: Array, *_: Array) -> Array:
            self._keep(self._settled(moments))
            return moments[:1] * 0

        def kept(*batch: Any) -> tuple[Any, ...]:
            loss, sums, had_gradients, exchanged, *noted = step(*batch)
            if tf.executing_eagerly():
                self._keep(self._settled(noted[0].numpy()))
            else:
                nothing = tf.numpy_function(carried(keep), noted, tf.float64, stateful=False)
                # Added to a result, or TensorFlow would remove the function as unused.
                exchanged += tf.reshape(nothing, [])
            return loss, sums, had_gradients, exchanged

        return kept

    def _settled(self, stamps: Array) -> list[float]:
        """Return a step's stamps as times of the run's clock; the step began after the previous one was stored."""
        settled = [WALL.settled(stamp, self._kept_s) for stamp in stamps.tolist()]
        self._kept_s = WALL.now_s()
        return settled

    def _keep(self, at: Sequence[float]) -> None:
        calls, num = self._calls, len(self._members)
        passed, ready, begins, ends = at[: -3 * num], at[-3 * num : -2 * num], at[-2 * num : -num], at[-num:]
        spans = [
            (FORWARD, call.layer, begin, end)
            for call, (begin, end), is_visible in zip(calls, itertools.pairwise(passed), self._visible, strict=True)
            if is_visible
        ]
        spans += self._backward(ready, passed[-1] if passed else None)
        spans += zip(itertools.repeat(LAYER_UPDATE), self._members, begins, ends, strict=False)  # `repeat` has no end
        self._recorder.layers(spans)

    def gradients_recorded(self, gradients: Sequence[Any], after: Sequence[Any]) -> None:
        """For a step that other code builds: the time before the first gradient is not known."""
        if tf.executing_eagerly():
            return  # all of them are available
        ready = tf.stack(self._each(tf.zeros([]), gradients))

        def keep(moments: Array) -> bool:
            self._recorder.layers(self._backward(self._settled(moments), None))
            return True

        with tf.control_dependencies(after):
            call_python(keep, [ready], tf.bool)

    def _noted(self, layer: Any, call: Any) -> Any:
        names = list(dict.fromkeys(layer_of(variable.path) for variable in layer.trainable_variables))
        name = names[0] if len(names) == 1 else layer.path

        def noted(*args: Any, **kwargs: Any) -> Any:
            before = len(self._calls)
            outputs = call(*args, **kwargs)
            noted_call = _Call(layer=name, inputs=_tensors((args, kwargs)), outputs=_tensors(outputs))
            # Record the inner layers in place of a layer made of layers; but not if they are called inside a loop.
            inside = [
                inner
                for inner in self._calls[before:]
                if noted_call.outputs and _in_graph(inner, noted_call.outputs[0].graph)
            ]
            self._calls[before:] = inside or [noted_call] * bool(noted_call.inputs and noted_call.outputs)
            return outputs

        return noted

    def _is_alone(self, call: _Call) -> bool:
        """Whether this layer was called once."""
        return [other_call.layer for other_call in self._calls].count(call.layer) == 1

    def _each(self, value: Any, tensors: Sequence[Any]) -> list[Any]:
        """Return for each layer the stamp when all of its `tensors` are available."""
        return [_moment(value, [tensors[index] for index in indices]) for indices in self._members.values()]

    def _backward(self, ready: Sequence[float], begin: float | None) -> Iterable[tuple[str, str, float, float]]:
        """Yield the layers in the order of their gradients; the first starts at `begin`, if that is known."""
        for layer, end in sorted(zip(self._members, ready, strict=True), key=lambda one: one[1]):
            if begin is not None:
                yield BACKWARD, layer, min(begin, end), end
            begin = end


def layers_of(recorder: Recorder, paths: Sequence[str]) -> NoLayers:
    """Return the recorder of the layers with variables of these paths, if `recorder` wants layers."""
    return Layers(recorder, paths) if recorder.wants_layers else NoLayers()


def _in_graph(call: _Call, graph: Any) -> bool:
    return all(tensor.graph is graph for tensor in (*call.inputs, *call.outputs))


def _tensors(values: Any) -> list[Any]:
    """Return the graph tensors among `values`."""
    return [value for value in tf.nest.flatten(values) if isinstance(value, tf.Tensor) and hasattr(value, "graph")]


def _mark(tensor: Any) -> Any:
    """Return the first element of `tensor`, if any, to wait for instead: waiting for `tensor` could prevent fusion."""
    rank = tensor.shape.rank
    return tf.reshape(tensor, [-1])[:1] if rank is None else tensor[(slice(0, 1),) * rank]


def _moment(value: Any, after: Sequence[Any]) -> Any:
    """Return a `timestamp` (scalar float64) of when `after` are available; `value` is a scalar available no later.

    TensorFlow's own clock must wait for nothing else: by default it would run after all earlier Python functions.
    """
    order = getattr(tf.compat.v1.get_default_graph(), "experimental_acd_manager", None)
    if order is None or not has_own_clock():
        return timestamp_beside(value, after)
    with tf.control_dependencies(after):
        moment = tf.timestamp()
    order.run_independently(moment.op)
    return -moment  # negative, as in `timestamp`


def _follows(call: _Call, tensors: Sequence[Any], calls: Sequence[_Call]) -> bool:
    """Whether `tensors` depend on the outputs of `call`, with no other of `calls` between."""
    own_names = call.made_by
    other_names = set[str]().union(*(other_call.made_by for other_call in calls)) - own_names
    visited, ahead = set[str](), [tensor.op for tensor in tensors]
    while ahead:
        operation = ahead.pop()
        if operation.name in own_names:
            return True
        if operation.name not in visited and operation.name not in other_names:
            visited.add(operation.name)
            ahead += [tensor.op for tensor in operation.inputs]
    return False
