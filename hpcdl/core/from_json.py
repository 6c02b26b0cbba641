"""Frozen dataclasses from JSON, checked field by field, by their type hints; and the JSON Schema of such a class."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hpcdl.core.errors import CorruptError, shown
from hpcdl.core.files import read_json

Record = TypeVar("Record")
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}


def from_json(cls: type[Record], document: Mapping[str, Any]) -> Record:
    """A dataclass from a JSON object; unknown keys are ignored. TypeError and ValueError name the bad field."""
    _checked(document, dict, cls.__name__, "object")
    converters = _field_converters(cls)  # type: ignore[arg-type]  # every class is hashable, mypy misses it for type[T]
    return cls(**{name: convert(document[name], name) for name, convert in converters.items() if name in document})


def read_as(cls: type[Record], path: Path, schema: str, remedy: str = "") -> Record:
    """The dataclass in a JSON file; CorruptError, with `remedy` behind it, where it is damaged or not of `schema`."""
    document = read_json(path)
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise CorruptError(f"{path} has schema {found!r}, this hpcdl reads {schema!r}{remedy}")
    try:
        return from_json(cls, document)
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{path} is damaged: {error}{remedy}") from error


_Converter = Callable[[Any, str], Any]


@functools.cache
def _field_converters(cls: type) -> dict[str, _Converter]:
    """What turns each field's JSON into its type; made once, because a report reads thousands of records."""
    return {name: _converter(hint) for name, hint in get_type_hints(cls).items()}


def _converter(hint: Any) -> _Converter:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, name: value
    if type(None) in arguments:
        inner = _converter(next(argument for argument in arguments if argument is not type(None)))
        return lambda value, name: None if value is None else inner(value, name)
    if origin is not None and issubclass(origin, Mapping):
        return _of_mapping(_converter(arguments[1]), arguments[1])
    if origin is not None and issubclass(origin, Sequence):
        return _of_sequence(_converter(arguments[0]), arguments[0])
    if dataclasses.is_dataclass(hint):
        return lambda value, name: from_json(hint, _checked(value, dict, name, "object"))  # type: ignore[arg-type]
    return _of_scalar(hint)


def _of_mapping(convert: _Converter, kind: type) -> _Converter:
    def of_object(value: Any, name: str) -> dict[str, Any]:
        items: dict[str, Any] = _checked(value, dict, name, "object")
        if kind is not int and set(map(type, items.values())) <= {kind}:
            return items
        return {key: convert(item, name) for key, item in items.items()}

    return of_object


def _of_sequence(convert: _Converter, kind: type) -> _Converter:
    def of_list(value: Any, name: str) -> tuple[Any, ...]:
        items = _checked(value, list, name, "list")
        if kind is not int and set(map(type, items)) <= {kind}:  # the common case: thousands of times
            return tuple(items)
        return tuple(convert(item, name) for item in items)

    return of_list


def _of_scalar(hint: type) -> _Converter:
    accepted = (int, float) if hint is float else (hint,)

    plain = hint if hint is not int else None

    def of_scalar(value: Any, name: str) -> Any:
        if type(value) is plain:  # hundreds of thousands of times in a report
            return value
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise TypeError(f"{name} is {shown(value)}, expected {hint.__name__}")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name} is a whole number of more than 64 bits")
        return hint(value)

    return of_scalar


def _checked(value: Any, kind: type, name: str, word: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{name} is no {word}")
    return value


def schema_of(cls: type) -> dict[str, Any]:
    """The JSON Schema of what `from_json` takes for `cls`; unknown keys are allowed."""
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    absent = dataclasses.MISSING
    required = [item.name for item in fields if item.default is absent and item.default_factory is absent]
    return {
        "type": "object",
        "properties": {item.name: _schema_of_hint(hints[item.name]) for item in fields},
        "required": required,
        "additionalProperties": True,
    }


def _schema_of_hint(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if type(None) in arguments:
        return {
            "anyOf": [_schema_of_hint(next(item for item in arguments if item is not type(None))), {"type": "null"}]
        }
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema_of_hint(arguments[1])}
    if origin is not None and issubclass(origin, Sequence):
        return {"type": "array", "items": _schema_of_hint(arguments[0])}
    return {"type": _SCALARS[hint]} if hint in _SCALARS else schema_of(hint)
