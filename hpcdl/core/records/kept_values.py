"""Values of a user's script as JSON, and back: values that JSON lacks are encoded so that they return unchanged.

JSON has no infinity (`best=float("inf")`), and turns numeric keys of a dict into text.
"""

from __future__ import annotations

import json
import math
from typing import Any

_NUMBER, _PAIRS = "hpcdl.number", "hpcdl.pairs"


def kept(value: Any) -> Any:
    """Encode `value` for `json.dumps`; tuples become lists. Raises TypeError for types that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: repr(float(value))}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in (_NUMBER, _PAIRS) for key in value):
            return {key: kept(part) for key, part in value.items()}
        return {_PAIRS: [[kept(key), kept(part)] for key, part in value.items()]}
    if isinstance(value, list | tuple):
        return [kept(part) for part in value]
    json.dumps(value)  # only to raise TypeError
    return value


def given_back(value: Any) -> Any:
    """Decode what `kept` encoded, after `json.loads`."""
    if isinstance(value, list):
        return [given_back(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_NUMBER}:
        return float(value[_NUMBER])
    if value.keys() == {_PAIRS}:
        return {_as_key(given_back(key)): given_back(part) for key, part in value[_PAIRS]}
    return {key: given_back(part) for key, part in value.items()}


def _as_key(value: Any) -> Any:
    """Return a key as it was: lists, which cannot be keys, were tuples."""
    return tuple(_as_key(part) for part in value) if isinstance(value, list) else value
