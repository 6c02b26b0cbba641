"""Values of a user's script as JSON, and back: what JSON has no word for is written so that it comes back the same.

JSON has no infinity (`best=float("inf")`), and makes texts of the numbers that are keys of a dict.
"""

from __future__ import annotations

import json
import math
from typing import Any

_NUMBER, _PAIRS = "hpcdl.number", "hpcdl.pairs"


def kept(value: Any) -> Any:
    """`value` for `json.dumps`; tuples become lists. TypeError for what is no number, text, list or dict of these."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_NUMBER: repr(float(value))}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in (_NUMBER, _PAIRS) for key in value):
            return {key: kept(one) for key, one in value.items()}
        return {_PAIRS: [[kept(key), kept(one)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        return [kept(one) for one in value]
    json.dumps(value)
    return value


def given_back(value: Any) -> Any:
    """What `kept` has been given, of what JSON holds."""
    if isinstance(value, list):
        return [given_back(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_NUMBER}:
        return float(value[_NUMBER])
    if value.keys() == {_PAIRS}:
        return {_as_key(given_back(key)): given_back(one) for key, one in value[_PAIRS]}
    return {key: given_back(one) for key, one in value.items()}


def _as_key(value: Any) -> Any:
    """A list was a tuple: lists are no keys."""
    return tuple(_as_key(one) for one in value) if isinstance(value, list) else value
