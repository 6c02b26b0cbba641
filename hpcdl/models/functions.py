"""Functions of the user's own, run from their file or module: what goes wrong in them is one line that says where."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from hpcdl.core.errors import UsageError, failure
from hpcdl.models.spec import UserFunction, existing_file, function_missing, module_missing

ASKED = {
    "model": "a model function takes num_classes and input_shape, or neither, and returns a keras.Model",
    "preprocess": "a preprocess function takes inputs and targets, by name also training and seed, and returns both",
}
"""What a function has to look like, by what it is for."""
DEPENDS_ON_DATA = ("num_classes", "input_shape")
"""What a model function may take, and is not given where the data does not say."""


def user_function(builder: UserFunction) -> Callable[..., Any]:
    """The function itself, its file or module run; UsageError where that fails or has no such function."""
    module = _file_module(builder, existing_file(builder)) if builder.path else _named_module(builder)
    function = getattr(module, builder.function, None)
    if function is None:
        known = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
        raise function_missing(builder, known)
    if not callable(function):
        raise UsageError(
            f"{builder.what} {str(builder)!r} is not a function but {type(function).__name__}; {ASKED[builder.what]}"
        )
    return function  # type: ignore[no-any-return]  # getattr of a module: its signature is looked at before the call


def _file_module(builder: UserFunction, path: Path) -> ModuleType:
    # A name of its own: a file called json.py must not become the module json.
    name = f"hpcdl_user_{builder.what}_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise UsageError(f"{builder.what} {str(builder)!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # as an import does: classes in the file look themselves up there
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        del sys.modules[name]
        raise failed(builder, error, str(path)) from error
    return module


def _named_module(builder: UserFunction) -> ModuleType:
    try:
        return importlib.import_module(builder.module)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{builder.module}.".startswith(f"{missing}."):
            raise module_missing(builder) from error
        raise failed(builder, error) from error


def call(builder: UserFunction, function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """What `function` returns for those of `given` that its signature names, by keyword."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{builder.what} {str(builder)!r} has no signature that Python can read; {ASKED[builder.what]}"
        ) from error
    accepted = {item.name for item in parameters if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)}
    takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters)
    arguments = {name: value for name, value in given.items() if takes_all or name in accepted}
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [item.name for item in parameters if item.default is item.empty and item.kind not in optional]
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
    """One line for an exception in the user's code: its innermost line in `file`, or else the innermost of all."""
    return UsageError(f"{builder.what} {str(builder)!r} {failure(error, file)}")


def kind_of(value: Any) -> str:
    """What was returned, for a line about it."""
    return "None (is there a `return`?)" if value is None else f"an object of type {type(value).__name__}"
