"""Frozen dataclasses from JSON, checked field by field, by their type hints; and the JSON Schema of such a class."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hpcdl.core.errors import CorruptError, shown
from hpcdl.core.files import read_json, shallow

Record = TypeVar("Record")
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}


def from_json(cls: type[Record], document: Mapping[str, Any]) -> Record:
    """A dataclass from a JSON object; unknown keys are ignored. TypeError and ValueError name the bad field.

    What it gives is nested as deep as its classes, and no deeper than MOST_DEPTH where they say Any.
    """
    found: Record = _from_object(cls)(document, cls.__name__)  # type: ignore[arg-type]  # mypy: type[T] is no Hashable
    return found


def check_fields(cls: type, document: Mapping[str, Any]) -> None:
    """TypeError or ValueError names a field of `cls` in `document` that is of a wrong type; fields may be missing."""
    for name, plain, convert in _fields_of(cls):
        if name in document and type(document[name]) not in plain:
            convert(document[name], name)


def read_as(cls: type[Record], path: Path, schema: str, remedy: str = "") -> Record:
    """The dataclass in a JSON file; CorruptError, with `remedy` behind it, where it is damaged or not of `schema`."""
    return read_with(functools.partial(from_json, cls), path, schema, remedy)


def read_with(
    reader: Callable[[dict[str, Any]], Record], path: Path | str, schema: str, remedy: str = "",
    *, parse: Callable[[bytes], Any] = json.loads,
) -> Record:  # fmt: skip
    """What `reader` makes of a JSON object; it raises TypeError or ValueError where that is damaged, as `from_json`.

    `parse` reads the JSON; it need not look at the depth, because from_json looks no deeper than its classes.
    """
    document = read_json(path, parse=parse)
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise CorruptError(f"{path} has schema {found!r}, this hpcdl reads {schema!r}{remedy}")
    try:
        return reader(document)
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{path} is damaged: {error}{remedy}") from error


_Converter = Callable[[Any, str], Any]
_Look = tuple[Sequence[tuple[str, _Converter]], Iterable[str]]
"""The fields whose values are to be converted, and the keys that are no fields."""
_MOST_WHOLE, _MOST_SHAPES = 2**63, 1000
_AS_IT_IS: dict[type, frozenset[type]] = {kind: frozenset({kind}) for kind in (str, float, bool)}
"""Types of values that need no look, by the hint: nearly all of the hundreds of thousands in a report's records."""
_NOT_NESTED = frozenset[type]((str, int, float, bool, type(None)))


@functools.cache
def _fields_of(cls: type) -> Sequence[tuple[str, frozenset[type], _Converter]]:
    return [(name, *_converter(hint)) for name, hint in get_type_hints(cls).items()]


@functools.cache
def _from_object(cls: type) -> _Converter:
    """What turns an object into `cls`; made once, because a report reads thousands of records."""
    fields = _fields_of(cls)
    make = maker(cls)
    looked_at: dict[tuple[Any, ...], _Look] = {}

    def look(document: dict[str, Any]) -> _Look:
        """What is to do with objects of these keys, in this order, and these types of values: thousands are alike."""
        shape = (*document, *map(type, document.values()))
        found = looked_at.get(shape)
        if found is None:
            known = [(key, plain, convert) for key, plain, convert in fields if key in document]
            odd = [(key, convert) for key, plain, convert in known if type(document[key]) not in plain]
            found = odd, document.keys() - {key for key, *_ in known}
            if len(looked_at) < _MOST_SHAPES:
                looked_at[shape] = found
        return found

    def of_object(value: Any, name: str) -> Any:
        document = value if type(value) is dict else _checked(value, dict, name, "object")
        odd, unknown = look(document)
        found = document.copy()
        for key, convert in odd:
            found[key] = convert(found[key], key)
        for key in unknown:
            del found[key]
        return make(found)

    return of_object


def maker(cls: type) -> Callable[[dict[str, Any]], Any]:
    """What makes a `cls` of its fields, which are checked: a frozen class's own `__init__` takes five times as long."""
    members = dataclasses.fields(cls)
    absent = dataclasses.MISSING
    defaults = {item.name: item.default for item in members if item.default is not absent}
    factories = [(item.name, item.default_factory) for item in members if item.default_factory is not absent]
    required = {item.name for item in members} - defaults.keys() - {name for name, _ in factories}
    own_init = hasattr(cls, "__post_init__") or "__slots__" in vars(cls)

    def make(found: dict[str, Any]) -> Any:
        if own_init or not required <= found.keys():
            return cls(**found)  # which names what is missing
        new: Any = object.__new__(cls)
        values = vars(new)
        values.update(defaults)
        values.update(found)
        for name, factory in factories:
            if name not in found:
                values[name] = factory()
        return new

    return make


def _converter(hint: Any) -> tuple[frozenset[type], _Converter]:
    """The types of values that may stay as they are, and what turns the others into `hint`."""
    origin, arguments = get_origin(hint), get_args(hint)
    nothing = frozenset[type]()
    if hint is Any:
        return _NOT_NESTED, lambda value, name: shallow(value)
    if type(None) in arguments:
        plain, convert = _converter(next(argument for argument in arguments if argument is not type(None)))
        return plain | {type(None)}, convert
    if origin is not None and issubclass(origin, Mapping):
        return nothing, _of_mapping(*_converter(arguments[1]))
    if origin is not None and issubclass(origin, Sequence):
        return nothing, _of_sequence(*_converter(arguments[0]))
    kind: type = hint
    if dataclasses.is_dataclass(hint):
        return nothing, _from_object(kind)
    return _AS_IT_IS.get(kind, nothing), _of_scalar(kind)


def _of_mapping(plain: frozenset[type], convert: _Converter) -> _Converter:
    def of_mapping(value: Any, name: str) -> dict[str, Any]:
        items: dict[str, Any] = value if type(value) is dict else _checked(value, dict, name, "object")
        if plain.issuperset(map(type, items.values())):
            return items
        return {key: convert(item, name) for key, item in items.items()}

    return of_mapping


def _of_sequence(plain: frozenset[type], convert: _Converter) -> _Converter:
    def of_list(value: Any, name: str) -> tuple[Any, ...]:
        items = _checked(value, list, name, "list")
        if plain.issuperset(map(type, items)):
            return tuple(items)
        return tuple([convert(item, name) for item in items])

    return of_list


def _of_scalar(hint: type) -> _Converter:
    accepted = (int, float) if hint is float else (hint,)

    def of_scalar(value: Any, name: str) -> Any:
        if type(value) is hint is int and -_MOST_WHOLE < value < _MOST_WHOLE:
            return value
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise TypeError(f"{name} is {shown(value)}, expected {hint.__name__}")
        if isinstance(value, int) and abs(value) >= _MOST_WHOLE:
            raise ValueError(f"{name} is a whole number of more than 64 bits")
        return hint(value)

    return of_scalar


def _checked(value: Any, kind: type, name: str, word: str) -> Any:
    if not isinstance(value, kind):
        article = "an" if word[0] in "aeiou" else "a"
        raise TypeError(f"{name} is not {article} {word}")
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
