"""Frozen dataclasses from JSON, checked field by field by their type hints; and the JSON Schema of such a class.

msgspec decodes. This module adds four guarantees that msgspec lacks. Lists become tuples; integers have at most 64
bits; values of any type are nested at most MOST_DEPTH deep; `vars` of a record includes defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from hpcdl.core.errors import CorruptError, shown
from hpcdl.core.storage.files import in_json, read_content, shallow

Record = TypeVar("Record")
_MOST_WHOLE = 2**63
_SCHEMA_FIRST = re.compile(rb'\s*\{\s*"schema"\s*:')
"""The beginning of a file written by hpcdl; in other files a default must not replace a missing schema."""
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")
"""A field or an index, in the path at the end of msgspec's errors."""
_Finish = Callable[[Any], Any]


def from_json(cls: type[Record], document: Mapping[str, Any]) -> Record:
    """Return a dataclass from a JSON object; unknown keys are ignored. Raises ValueError naming the bad field."""
    import msgspec

    try:
        record = msgspec.convert(document, cls)
    except msgspec.ValidationError as error:
        raise ValueError(_in_words(str(error), document, cls)) from None
    return _finished(cls, record)


def decoded(cls: type[Record], content: bytes) -> Record | None:
    """Return the same from the JSON in `content`, several times faster; None if it is damaged.

    Also None for what Python's parser accepts and JSON lacks (NaN): `from_json` reads it, or reports the problem.
    """
    import msgspec

    try:
        record: Record = _decoder(cls)(content)  # type: ignore[arg-type]  # mypy: type[T] is no Hashable
        return _finished(cls, record)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


@functools.cache
def _decoder(cls: type) -> Callable[[bytes], Any]:
    import msgspec

    return msgspec.json.Decoder(cls).decode


def _finished(cls: type[Record], record: Record) -> Record:
    """Return `record` with the guarantees that msgspec lacks: see the head of this file."""
    finish = _finish_of(cls)  # type: ignore[arg-type]  # mypy: type[T] is no Hashable
    finished: Record = record if finish is None else finish(record)
    return finished


def check_fields(cls: type, document: Mapping[str, Any]) -> None:
    """Raise ValueError naming a field of `cls` that has a wrong type in `document`; fields may be missing."""
    from_json(partly(cls), document)


@functools.cache
def partly(cls: type, without: Sequence[str] = ()) -> type:
    """Return `cls` with None as the default of every field, and without the fields in `without`."""
    fields = [(name, hint, None) for name, hint in get_type_hints(cls).items() if name not in without]
    return dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)


def read_as(cls: type[Record], path: Path | str, schema: str, remedy: str = "") -> Record:
    """Return the dataclass in a JSON file. Raises CorruptError, with `remedy`, if damaged or not of `schema`."""
    content = read_content(path)
    record = decoded(cls, content) if _SCHEMA_FIRST.match(content) else None
    if record is not None and getattr(record, "schema", schema) == schema:
        return record
    return _read_with(functools.partial(from_json, cls), content, path, schema, remedy)


def read_with(reader: Callable[[dict[str, Any]], Record], path: Path | str, schema: str) -> Record:
    """Return the result of `reader` for the JSON object in a file of `schema`; it raises ValueError for damage."""
    return _read_with(reader, read_content(path), path, schema, "")


def _read_with(
    reader: Callable[[dict[str, Any]], Record], content: bytes, path: Path | str, schema: str, remedy: str
) -> Record:
    document = in_json(json.loads, content, path)  # from_json checks the depth of the fields that need it
    found_schema = document.get("schema") if isinstance(document, dict) else None
    if found_schema != schema:
        raise CorruptError(f"{path} has schema {found_schema!r}, this hpcdl reads {schema!r}{remedy}")
    try:
        return reader(document)
    except (TypeError, ValueError) as error:
        raise CorruptError(f"{path} is damaged: {error}{remedy}") from error


def _in_words(error: str, document: Any, cls: type) -> str:
    """Return a message of msgspec with the given value: `ranks is 'many', expected int`."""
    reason, _, field_path = error.replace("`", "").partition(" - at $")
    name = field_path.removeprefix(".") or cls.__name__
    if reason.startswith("Expected ") and "[...]" not in field_path:  # else: in a mapping, whose key is not named
        value = document
        for key, index in _STEP.findall(field_path):
            value = value[key] if key else value[int(index)]
        return f"{name} is {shown(value)}, {reason.partition(', got')[0].replace('E', 'e', 1)}"
    return f"{name}: {reason}"


@functools.cache
def _finish_of(hint: Any) -> _Finish | None:
    """Return the function that finishes a value of `hint`, which has the right type; None if there is nothing to do."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any or (origin is not None and issubclass(origin, Mapping) and arguments[1] is Any):
        return shallow
    if hint is int:
        return _whole
    if type(None) in arguments:
        return _if_there(_finish_of(next(argument for argument in arguments if argument is not type(None))))
    if origin is not None and issubclass(origin, Mapping):
        return _in_mapping(_finish_of(arguments[1]))
    if origin is not None and issubclass(origin, Sequence):
        inner = _finish_of(arguments[0])
        return tuple if inner is None else lambda value: tuple(map(inner, value))
    return _of_record(hint) if dataclasses.is_dataclass(hint) else None


def _in_mapping(inner: _Finish | None) -> _Finish | None:
    return None if inner is None else lambda value: {key: inner(entry) for key, entry in value.items()}


def _if_there(inner: _Finish | None) -> _Finish | None:
    return None if inner is None else lambda value: None if value is None else inner(value)


def _of_record(cls: Any) -> _Finish | None:
    hints = get_type_hints(cls)
    odd = [(name, finish) for name, hint in hints.items() if (finish := _finish_of(hint)) is not None]
    fields = dataclasses.fields(cls) if "__slots__" not in vars(cls) else ()
    defaults = {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}

    def of_record(record: Any) -> Any:
        # Msgspec does not store defaults in the object, so `vars` lacks them.
        if defaults and len(values := vars(record)) < len(hints):
            values |= defaults | values
        for name, finish in odd:
            value = getattr(record, name)
            if value is None or (type(value) is int and -_MOST_WHOLE < value < _MOST_WHOLE) or value == ():
                continue  # true for nearly all values: a report reads thousands of records
            try:
                finished = finish(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            if finished is not value:
                object.__setattr__(record, name, finished)  # it is frozen, but no other code has it yet
        return record

    return of_record if odd or defaults else None


def _whole(value: int) -> int:
    if not -_MOST_WHOLE < value < _MOST_WHOLE:
        raise ValueError("a whole number of more than 64 bits")
    return value


def schema_of(cls: type) -> dict[str, Any]:
    """Return the JSON Schema of the input of `from_json` for `cls`; unknown keys are allowed."""
    import msgspec

    (_,), named = msgspec.json.schema_components([cls])
    for definition in named.values():
        definition.pop("description", None)  # the docstring, which is for readers of the code
        for member in definition.get("properties", {}).values():
            if member.get("default") == {}:
                del member["default"]  # msgspec >= 0.23 writes it; the schema is the same with every version
    schema: dict[str, Any] = named.pop(cls.__name__)
    return {**schema, "$defs": named} if named else schema
