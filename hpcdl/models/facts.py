"""What a network of the user's own says of itself: the lengths of its gradients and its operations. Keras is loaded.

It is built and traced, and computes nothing. A saved model is looked at before Keras reads it (saved.py); a function of
the user's own is run, as `hpcdl train` runs it.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.core.errors import UsageError
from hpcdl.models.functions import ASKED, DEPENDS_ON_DATA, call, kind_of, user_function
from hpcdl.models.spec import UserFunction, parse_function

if TYPE_CHECKING:
    import keras

SAVED = (".keras", ".h5")
"""How the names of saved models end."""
_OPAQUE = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall",
           "StatefulPartitionedCall", "XlaCallModule", "PyFunc", "EagerPyFunc", "CudnnRNN", "CudnnRNNV3")  # fmt: skip
"""Operations whose own ones a graph does not show, or whose number its input decides."""


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """`lengths`: elements of each trainable variable, in the order in which they were made.

    `macs`: multiply-accumulates of convolutions and products of matrices, forward, of one sample; None where the graph
    does not tell: its shapes are open, or it has a loop.
    """

    lengths: tuple[int, ...]
    macs: int | None


def is_own(spec: str) -> bool:
    """Whether `spec` names a saved model or a function, and no network of the table or an emulation of one."""
    return spec.endswith(SAVED) or spec.rpartition(":")[0].endswith(".py") or _names_module(spec)


def _names_module(spec: str) -> bool:
    source, _, function = spec.rpartition(":")
    return function.isidentifier() and bool(source) and all(part.isidentifier() for part in source.split("."))


def facts_of(spec: str) -> OwnModel:
    """What the model that `spec` names says of itself; UsageError where there is none, or nothing to train in it."""
    model = _saved(Path(spec).expanduser()) if spec.endswith(SAVED) else _built(parse_function(spec))
    if not model.built:
        raise UsageError(f"--model {spec} has no weights yet; give it a keras.Input")
    lengths = tuple(math.prod(one.shape) for one in model.trainable_variables)
    if not lengths:
        raise UsageError(f"--model {spec} has nothing to train: every layer has trainable=False, or no weights")
    return OwnModel(lengths=lengths, macs=macs_of(model))


def _saved(path: Path) -> keras.Model:
    from hpcdl.models.saved import load_saved

    if not path.is_file():
        raise UsageError(f"--model {path}: there is no such file; give FILE.keras or FILE.py:FUNCTION")
    try:
        return load_saved(path, {})
    except ValueError as error:
        raise UsageError(f"--model {path}: {error}") from error


def _built(builder: UserFunction) -> keras.Model:
    import keras

    function = user_function(builder)
    needed = [
        name
        for name, item in inspect.signature(function).parameters.items()
        if name in DEPENDS_ON_DATA and item.default is item.empty and item.kind is not item.VAR_KEYWORD
    ]
    if needed:
        raise UsageError(
            f"--model {builder} needs {needed[0]}, which only data tells; give the argument a default, or the file"
            " model.keras of a run"
        )
    model = call(builder, function, {})
    if not isinstance(model, keras.Model):
        raise UsageError(f"--model {builder} returned {kind_of(model)}, not a Keras model; {ASKED['model']}")
    return model


def macs_of(model: keras.Model) -> int | None:
    """Forward, of one sample, counted in the model's graph; None where that does not tell."""
    import keras
    import tensorflow as tf

    try:
        symbols = tf.nest.map_structure(
            lambda one: tf.TensorSpec((1, *one.shape[1:]), keras.backend.standardize_dtype(one.dtype)), model.inputs
        )
        inputs = symbols[0] if len(symbols) == 1 else symbols
        graph = tf.function(lambda given: model(given, training=False)).get_concrete_function(inputs).graph
        return sum(map(_macs_of_operation, graph.get_operations()))
    except (ValueError, TypeError, AttributeError):  # a class without inputs, open shapes, a loop
        return None


def _macs_of_operation(operation: Any) -> int:
    """ValueError where its shapes do not tell."""
    if operation.type in _OPAQUE:
        raise ValueError(f"{operation.type} hides its operations")
    shapes = [_known(one.shape) if operation.type in _COUNTED else () for one in operation.inputs]
    if operation.type in ("MatMul", "BatchMatMul", "BatchMatMulV2"):
        turned = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
        return math.prod(_known(operation.outputs[0].shape)) * shapes[0][-2 if turned else -1]
    if operation.type in ("Conv2D", "Conv3D", "DepthwiseConv2dNative"):
        return _positions(operation, operation.outputs[0]) * math.prod(shapes[1])
    if operation.type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):  # a transposed convolution
        return _positions(operation, operation.inputs[2]) * math.prod(shapes[1])
    if operation.type == "Einsum":
        return _macs_of_sum(operation.get_attr("equation").decode(), shapes)
    return 0


_COUNTED = ("MatMul", "BatchMatMul", "BatchMatMulV2", "Conv2D", "Conv3D", "DepthwiseConv2dNative",
            "Conv2DBackpropInput", "Conv3DBackpropInputV2", "Einsum")  # fmt: skip


def _known(shape: Any) -> tuple[int, ...]:
    return tuple(map(int, shape.as_list()))  # TypeError where a length is None


def _positions(operation: Any, tensor: Any) -> int:
    """How many places of `tensor` a kernel is applied to."""
    shape = _known(tensor.shape)
    first = operation.get_attr("data_format") in (b"NCHW", b"NCDHW")
    return math.prod(shape[2:] if first else shape[1:-1])


def _macs_of_sum(equation: str, shapes: list[tuple[int, ...]]) -> int:
    """Each combination of an einsum's indices is one; `...` is left to a look at the shapes."""
    if "." in equation:
        raise ValueError("an einsum of open rank")
    lengths: dict[str, int] = {}
    for labels, shape in zip(equation.partition("->")[0].split(","), shapes, strict=True):
        lengths |= dict(zip(labels, shape, strict=True))
    return math.prod(lengths.values())
