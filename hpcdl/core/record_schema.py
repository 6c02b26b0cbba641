"""The JSON Schema of a record, made from the dataclass, so that the two cannot part.

`python -m hpcdl.core.record_schema > share/hpcdl/schemas/run-1.json` writes the file that is installed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin, get_type_hints

from hpcdl.core.records import SCHEMA, RunRecord

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean"}


def record_schema() -> dict[str, Any]:
    """The schema of record.json. Unknown fields are allowed: /1 only grows."""
    schema = {"$schema": DIALECT, "title": f"A run of hpcdl ({SCHEMA})", **_object(RunRecord)}
    schema["properties"]["schema"] = {"const": SCHEMA}
    schema["required"] = ["schema", *schema["required"]]
    return schema


def _object(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    absent = dataclasses.MISSING
    required = [item.name for item in fields if item.default is absent and item.default_factory is absent]
    return {
        "type": "object",
        "properties": {item.name: _of(hints[item.name]) for item in fields},
        "required": required,
        "additionalProperties": True,
    }


def _of(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if type(None) in arguments:
        return {"anyOf": [_of(next(item for item in arguments if item is not type(None))), {"type": "null"}]}
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _of(arguments[1])}
    if origin is not None and issubclass(origin, Sequence):
        return {"type": "array", "items": _of(arguments[0])}
    return {"type": _SCALARS[hint]} if hint in _SCALARS else _object(hint)


if __name__ == "__main__":
    print(json.dumps(record_schema(), indent=1))
