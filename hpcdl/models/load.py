"""Turn `--model` into a Keras model: a network of the table or the user's own; also find a model's sizes.

The model is built and traced, but computes nothing. A saved model is checked before Keras reads it (saved.py). A user's
function is run, as `hpcdl train` runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcdl.config.schema import CROSS_ENTROPY
from hpcdl.core.errors import UsageError, failure
from hpcdl.models.table import (
    REGISTRY,
    UserFunction,
    check_input,
    existing_file,
    function_missing,
    model_info,
    module_missing,
    parse_emulation,
    parse_function,
    parse_spec,
)

if TYPE_CHECKING:
    import keras


ASKED = {
    "model": "a model function takes num_classes and input_shape, or neither, and returns a keras.Model",
    "preprocess": "a preprocess function takes inputs and targets, by name also training and seed, and returns both",
}
"""The required form of a user's function, by its use."""
DEPENDS_ON_DATA = ("num_classes", "input_shape")
"""Optional arguments of a model function that are omitted if the data does not determine them."""


def user_function(builder: UserFunction) -> Callable[..., Any]:
    """Run the user's file or module and return the function; UsageError if that fails or the function is missing."""
    module = _file_module(builder, existing_file(builder)) if builder.path else _named_module(builder)
    function = getattr(module, builder.function, None)
    if function is None:
        names = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
        raise function_missing(builder, names)
    if not callable(function):
        raise UsageError(
            f"{builder.what} {str(builder)!r} is not a function but {type(function).__name__}; {ASKED[builder.what]}"
        )
    return function  # type: ignore[no-any-return]  # getattr of a module: its signature is checked before the call


def _file_module(builder: UserFunction, path: Path) -> ModuleType:
    # A separate name: a file called json.py must not become the module json.
    name = f"hpcdl_user_{builder.what}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{builder.what} {str(builder)!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # as an import does: classes in the file look up their module here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        raise failed(builder, error, str(path)) from error
    return module


def _named_module(builder: UserFunction) -> ModuleType:
    try:
        return importlib.import_module(builder.module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # The module itself, or a package above it; one that it imports is an error in the user's code.
        if missing and f"{builder.module}.".startswith(f"{missing}."):
            raise module_missing(builder) from error
        raise failed(builder, error) from error


def call(builder: UserFunction, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call `function` with those of `given` that its signature names, by keyword, and return its result."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{builder.what} {str(builder)!r} has no signature that Python can read; {ASKED[builder.what]}"
        ) from error
    accepted = {
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    arguments = {name: value for name, value in given.items() if takes_all or name in accepted}
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty and parameter.kind not in optional
    ]
    unmet = [name for name in needed if name not in arguments]
    if unmet and unmet[0] in DEPENDS_ON_DATA:
        raise UsageError(
            f"{builder.what} {str(builder)!r} needs {unmet[0]}, which is not known here; give --classes, or a default"
        )
    if unmet:
        lacks = f"needs the argument {unmet[0]!r}, which hpcdl cannot give"
        raise UsageError(f"{builder.what} {str(builder)!r} {lacks}; {ASKED[builder.what]}")
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise failed(builder, error, inspect.getsourcefile(function) or "") from error


def failed(builder: UserFunction, error: BaseException, file: str = "") -> UsageError:
    """Return a one-line error for an exception in the user's code: its innermost line in `file`, or else overall."""
    return UsageError(f"{builder.what} {str(builder)!r} {failure(error, file)}")


def kind_of(value: Any) -> str:
    """Describe a returned value in a message."""
    return "None (is there a `return`?)" if value is None else f"an object of type {type(value).__name__}"


SAVED = (".keras", ".h5")
"""File endings of saved models."""
_OPAQUE = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall",
           "StatefulPartitionedCall", "XlaCallModule", "PyFunc", "EagerPyFunc", "CudnnRNN", "CudnnRNNV3")  # fmt: skip
"""Operations that hide their inner operations, or the number of these, from the graph."""


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """`lengths`: elements of each trainable variable, in order of creation.

    `macs`: multiply-accumulates of convolutions and matrix products, forward, for one sample; None if the graph does
    not determine them: shapes are open, or it has a loop.
    """

    lengths: tuple[int, ...]
    macs: int | None


def is_own(spec: str) -> bool:
    """Return whether `spec` names a saved model or a user's function, rather than a table's network or emulation."""
    return spec.endswith(SAVED) or spec.rpartition(":")[0].endswith(".py") or _names_module(spec)


def _names_module(spec: str) -> bool:
    source, _, function = spec.rpartition(":")
    return function.isidentifier() and bool(source) and all(part.isidentifier() for part in source.split("."))


def facts_of(spec: str) -> OwnModel:
    """Return the sizes of the model that `spec` names; UsageError if there is none, or it has nothing to train."""
    model = _saved(Path(spec).expanduser()) if spec.endswith(SAVED) else _built_anew(parse_function(spec))
    if not model.built:
        raise UsageError(f"--model {spec} has no weights yet; give it a keras.Input")
    lengths = tuple(math.prod(variable.shape) for variable in model.trainable_variables)
    if not lengths:
        raise UsageError(f"--model {spec} has nothing to train: every layer has trainable=False, or no weights")
    return OwnModel(lengths=lengths, macs=macs_of(model))


def _saved(path: Path) -> keras.Model:
    from hpcdl.models.saved import OwnCode, load_saved

    if not path.is_file():
        raise UsageError(f"--model {path}: there is no such file; give FILE.keras or FILE.py:FUNCTION")
    try:
        return load_saved(path, {})
    except ValueError as error:
        remedy = "; give FILE.py:FUNCTION" if isinstance(error, OwnCode) else ""
        raise UsageError(f"--model {path}: {error}{remedy}") from error


def _built_anew(builder: UserFunction) -> keras.Model:
    import keras

    function = user_function(builder)
    needed = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name in DEPENDS_ON_DATA
        and parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_KEYWORD
    ]
    if needed:
        raise UsageError(
            f"--model {builder} needs {needed[0]}, which only data determine; give the argument a default, or the file"
            " model.keras of a run"
        )
    model = call(builder, function, {})
    if not isinstance(model, keras.Model):
        raise UsageError(f"--model {builder} returned {kind_of(model)}, not a Keras model; {ASKED['model']}")
    return model


def macs_of(model: keras.Model) -> int | None:
    """Count the forward multiply-accumulates of one sample in the model's graph; None if the graph is insufficient."""
    import keras
    import tensorflow as tf

    try:
        symbols = tf.nest.map_structure(
            lambda tensor: tf.TensorSpec((1, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)),
            model.inputs,
        )
        inputs = symbols[0] if len(symbols) == 1 else symbols
        # Without training: what dropout and augmentation add is no multiply-accumulate of the network.
        graph = tf.function(lambda given: model(given, training=False)).get_concrete_function(inputs).graph
        return sum(map(_macs_of_operation, graph.get_operations()))
    except (ValueError, TypeError, AttributeError):  # a class without inputs, open shapes, a loop
        return None


def _macs_of_operation(operation: Any) -> int:
    """Count an operation's multiply-accumulates; ValueError if its shapes do not determine them."""
    if operation.type in _OPAQUE:
        raise ValueError(f"{operation.type} hides its operations")
    shapes = [_known(tensor.shape) if operation.type in _COUNTED else () for tensor in operation.inputs]
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
    return tuple(map(int, shape.as_list()))  # TypeError if a length is None


def _positions(operation: Any, tensor: Any) -> int:
    """Return the number of positions of `tensor` at which a kernel is applied."""
    shape = _known(tensor.shape)
    first = operation.get_attr("data_format") in (b"NCHW", b"NCDHW")
    return math.prod(shape[2:] if first else shape[1:-1])


def _macs_of_sum(equation: str, shapes: list[tuple[int, ...]]) -> int:
    """Return the product of all index lengths of an einsum; ValueError for `...`, whose rank is open."""
    if "." in equation:
        raise ValueError("an einsum of open rank")
    lengths: dict[str, int] = {}
    for labels, shape in zip(equation.partition("->")[0].split(","), shapes, strict=True):
        lengths |= dict(zip(labels, shape, strict=True))
    return math.prod(lengths.values())


Shapes = Mapping[str, tuple[int, ...]]


def load_model(
    spec: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | Shapes | None = None,
    loss: str = CROSS_ENTROPY,
    output_shapes: Shapes | None = None,
    scaled: bool = False,
) -> keras.Model:
    """Build the model that `spec` names for `classes` and samples of `input_shape` (H, W, C).

    None means the network's own default. Samples of named fields have any shape, with one shape per name for several
    inputs; their targets have `output_shapes`. `loss` determines the required outputs; `scaled` says that inputs are
    from 0 to 1. Raises UsageError for every error in the spec, the arguments or the user's function, with its file and
    line.
    """
    builder, policy = parse_spec(spec), _policy()
    shape = input_shape if input_shape is None or isinstance(input_shape, Mapping) else tuple(input_shape)
    if isinstance(builder, str):
        if isinstance(shape, Mapping):
            raise UsageError(f"{builder} takes one input, the data has {', '.join(shape)}; give FILE.py:build")
        info = model_info(builder)
        num_classes = info.classes if classes is None else classes
        shape = info.input_shape if shape is None else shape
        check_input(builder, num_classes, shape)
        model: keras.Model = REGISTRY.load(builder)(num_classes, shape)
        if emulation := parse_emulation(spec):
            from hpcdl.models.emulated import emulated

            model = emulated(model, emulation)
        if loss != CROSS_ENTROPY:
            _check(model, spec, loss, num_classes, shape, output_shapes, policy=policy)
        return model
    facts = {"num_classes": classes, "input_shape": shape}
    answer = call(builder, user_function(builder), {name: value for name, value in facts.items() if value is not None})
    model = _built(builder, answer, shape)
    _check(model, str(builder), loss, classes, shape, output_shapes, scaled=scaled, policy=policy)
    return model


def _policy() -> str:
    """Return Keras's dtype policy, which --precision has set before the model's function is called."""
    import keras

    return str(keras.config.dtype_policy().name)


def _check(
    model: keras.Model,
    spec: str,
    loss: str,
    classes: int | None,
    shape: tuple[int, ...] | Shapes | None,
    output_shapes: Shapes | None,
    *,
    scaled: bool = False,
    policy: str,
) -> None:
    from hpcdl.models.check import check_model

    check_model(
        model,
        spec=spec,
        loss=loss,
        classes=classes,
        input_shape=shape,
        output_shapes=output_shapes,
        scaled=scaled,
        policy=policy,
    )


def _built(builder: UserFunction, model: Any, input_shape: tuple[int, ...] | Shapes | None) -> keras.Model:
    """Return the user's model with its weights created; UsageError if it is no model, or has no weights."""
    import keras

    if not isinstance(model, keras.Model):
        raise UsageError(
            f"{builder.what} {str(builder)!r} returned {kind_of(model)}, not a Keras model; {ASKED[builder.what]}"
        )
    if not model.built and input_shape is not None:
        try:
            # A call also builds layers that a class creates in __init__; build() would only mark the model as built.
            if isinstance(input_shape, Mapping):
                model({name: keras.Input(shape, name=name) for name, shape in input_shape.items()})
            else:
                model(keras.Input(input_shape))
        except (Exception, SystemExit) as error:  # the user's layers may raise anything
            raise failed(builder, error) from error
    if not model.built:
        raise UsageError(f"{builder.what} {str(builder)!r} has no weights yet; give it a keras.Input")
    return model
