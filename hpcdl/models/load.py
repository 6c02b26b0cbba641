"""From `--model` to a Keras model: a network of the table, or the user's own function."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcdl.config.schema import CROSS_ENTROPY
from hpcdl.core.errors import UsageError
from hpcdl.models.spec import (
    UserFunction,
    existing_file,
    function_missing,
    module_missing,
    parse_emulation,
    parse_spec,
)
from hpcdl.models.table import REGISTRY, check_input, model_info

if TYPE_CHECKING:
    import keras

ARGUMENTS = ("num_classes", "input_shape")
"""What a model function may take, by keyword; it is given those that its signature names."""


Shapes = Mapping[str, tuple[int, ...]]


def load_model(
    spec: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | Shapes | None = None,
    loss: str = CROSS_ENTROPY,
    output_shapes: Shapes | None = None,
) -> keras.Model:
    """Build the model that `spec` names for `classes` and samples of `input_shape` (H, W, C).

    None means the network's own default. Samples of named fields have any shape, several inputs one by name; their
    targets have `output_shapes`. `loss` says what outputs have to be. Raises UsageError for everything that is
    wrong with the spec, the arguments or the user's function, naming the function's file and line.
    """
    builder = parse_spec(spec)
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
            _check(model, spec, loss, num_classes, shape, output_shapes)
        return model
    given = {"num_classes": classes, "input_shape": shape}
    made = _call(builder, _user_function(builder), {name: value for name, value in given.items() if value is not None})
    model = _built(builder, made, shape)
    _check(model, str(builder), loss, classes, shape, output_shapes)
    return model


def _check(
    model: keras.Model,
    spec: str,
    loss: str,
    classes: int | None,
    shape: tuple[int, ...] | Shapes | None,
    output_shapes: Shapes | None,
) -> None:
    from hpcdl.models.check import check_model

    check_model(model, spec=spec, loss=loss, classes=classes, input_shape=shape, output_shapes=output_shapes)


def _user_function(builder: UserFunction) -> Callable[..., Any]:
    module = _file_module(builder, existing_file(builder)) if builder.path else _named_module(builder)
    function = getattr(module, builder.function, None)
    if function is None:
        known = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
        raise function_missing(builder, known)
    if not callable(function):
        raise UsageError(f"model {str(builder)!r} is no function but {type(function).__name__}; {_asked()}")
    return function  # type: ignore[no-any-return]  # getattr of a module: its signature is looked at before the call


def _file_module(builder: UserFunction, path: Path) -> ModuleType:
    # A name of its own: a file called json.py must not become the module json.
    name = f"hpcdl_user_model_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UsageError(f"model {str(builder)!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # as an import does: classes in the file look themselves up there
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        raise _failed(builder, error, str(path)) from error
    return module


def _named_module(builder: UserFunction) -> ModuleType:
    try:
        return importlib.import_module(builder.module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{builder.module}.".startswith(f"{missing}."):
            raise module_missing(builder) from error
        raise _failed(builder, error) from error


def _call(builder: UserFunction, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(f"model {str(builder)!r} has no signature that Python can read; {_asked()}") from error
    accepted = {item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)}
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters)
    arguments = {name: value for name, value in given.items() if takes_all or name in accepted}
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [item.name for item in parameters if item.default is item.empty and item.kind not in optional]
    unmet = [name for name in needed if name not in arguments]
    if unmet and unmet[0] in ARGUMENTS:
        raise UsageError(
            f"model {str(builder)!r} needs {unmet[0]}, which is not known here; give --classes, or a default"
        )
    if unmet:
        raise UsageError(f"model {str(builder)!r} needs the argument {unmet[0]!r}, which hpcdl cannot give; {_asked()}")
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise _failed(builder, error, inspect.getsourcefile(function) or "") from error


def _built(builder: UserFunction, model: Any, input_shape: tuple[int, ...] | Shapes | None) -> keras.Model:
    """What the user's function returned, with its weights; UsageError where it is no model, or has none."""
    import keras

    if not isinstance(model, keras.Model):
        raise UsageError(f"model {str(builder)!r} returned {_kind(model)}, not a Keras model; {_asked()}")
    if not model.built and input_shape is not None:
        try:
            # A call builds layers that a class makes in its __init__ too; build() would only mark it as built.
            if isinstance(input_shape, Mapping):
                model({name: keras.Input(shape, name=name) for name, shape in input_shape.items()})
            else:
                model(keras.Input(input_shape))
        except (Exception, SystemExit) as error:  # the user's layers may raise anything
            raise _failed(builder, error) from error
    if not model.built:
        raise UsageError(f"model {str(builder)!r} has no weights yet; give it a keras.Input")
    return model


def _failed(builder: UserFunction, error: BaseException, file: str = "") -> UsageError:
    """One line for an exception in the user's code: its innermost line in `file`, or else the innermost of all."""
    if isinstance(error, SyntaxError):
        where: str | None = f"{error.filename}:{error.lineno}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == file] or frames[-1:]
        where = f"{own[-1].filename}:{own[-1].lineno}" if own else None
    detail = next(iter(str(error).strip().splitlines()), "no details")
    remedy = "; install it, or add its folder to PYTHONPATH" if isinstance(error, ModuleNotFoundError) else ""
    return UsageError(f"model {str(builder)!r} failed at {where}: {type(error).__name__}: {detail}{remedy}")


def _kind(value: Any) -> str:
    return "None (is there a `return`?)" if value is None else f"an object of type {type(value).__name__}"


def _asked() -> str:
    return "a model function takes num_classes and input_shape, or neither, and returns a keras.Model"
