"""Values of scripts are the same after conversion to JSON and back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from hpcdl.core.records.kept_values import given_back, kept


@pytest.mark.parametrize(
    "value",
    [
        *(3, -2.5, "text", None, True, [1, [2]], {"a": {"b": [1]}}),
        *(math.inf, -math.inf, [{"best": math.inf}]),
        *({0: "cat", "0": "dog"}, {(1, (2, 3)): [math.inf]}, {None: 1, True: 2}),
        *({"hpcdl.number": "1"}, {"hpcdl.pairs": [[1, 2]]}),
    ],
    ids=str,
)
def test_what_is_kept_comes_back_the_same(value: Any) -> None:
    text = json.dumps(kept(value), sort_keys=True, allow_nan=False)
    assert given_back(json.loads(text)) == value


def test_nan_comes_back_and_tuples_as_lists() -> None:
    assert math.isnan(given_back(json.loads(json.dumps(kept(math.nan), allow_nan=False))))
    assert given_back(kept({"pair": (1, 2)})) == {"pair": [1, 2]}


@pytest.mark.parametrize("value", [{1, 2}, [object()], {"a": b"bytes"}], ids=("set", "object", "bytes"))
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        kept(value)
