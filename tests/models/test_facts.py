"""Operations counted in a network's graph equal those counted by hand."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hpcdl.models.load import is_own
from tests.conftest import ROOT

COUNTED = """
import json, keras
from hpcdl.models.load import macs_of
from hpcdl.models.table import MODELS, REGISTRY

def of_table(name):
    return macs_of(REGISTRY.load(name)(MODELS[name].classes, MODELS[name].input_shape)) - MODELS[name].macs

def of(shape, *layers, **more):
    return macs_of(keras.Sequential([keras.Input(shape, **more), *layers]))

L = keras.layers
tokens = keras.Input((16, 32))
left, right = keras.Input((4,)), keras.Input((6,))
print(json.dumps({
    **{name: of_table(name) for name in ("lenet", "cifar10-quick", "resnet50", "hepcnn")},
    "attention": macs_of(keras.Model(tokens, L.MultiHeadAttention(2, 16)(tokens, tokens))),
    "two inputs": macs_of(keras.Model([left, right], L.Dense(3)(L.Concatenate()([left, right])))),
    "separable": of((16, 16, 8), L.SeparableConv2D(4, 3)),
    "transposed": of((5, 5, 8), L.Conv2DTranspose(4, 3, strides=2)),
    "one dimension": of((16, 16), L.Conv1D(4, 3)),
    "words": of((10,), L.Embedding(100, 8), L.GlobalAveragePooling1D(), L.Dense(2), dtype="int32"),
    "a loop": of((9, 4), L.LSTM(8)),
    "an open shape": of((None, 4), L.Dense(8)),
}))
"""
WANTED = {
    **dict.fromkeys(("lenet", "cifar10-quick", "resnet50", "hepcnn"), 0),
    "attention": 4 * 16 * 32 * 32 + 2 * 2 * 16 * 16 * 16,
    "two inputs": 30,
    "separable": 14 * 14 * (9 * 8 + 8 * 4),
    "transposed": 5 * 5 * 9 * 8 * 4,
    "one dimension": 14 * 3 * 16 * 4,
    "words": 16,
    "a loop": None,
    "an open shape": None,
}


@pytest.fixture(scope="module")
def counted() -> dict[str, int | None]:
    reported = subprocess.run(
        [sys.executable, "-c", COUNTED], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert reported.returncode == 0, reported.stderr[-3000:]
    found: dict[str, int | None] = json.loads(reported.stdout)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", WANTED)
def test_operations_are_counted_or_unknown(counted: dict[str, int | None], name: str) -> None:
    assert counted[name] == WANTED[name]


def test_what_is_a_network_of_one_s_own() -> None:
    assert all(map(is_own, ("a.keras", "~/b.h5", "x/net.py:build", "package.module:build")))
    assert not any(
        map(is_own, ("lenet", "mine", "emulated:resnet50:0.7s", "emulated:lenet:0.1s:3%", "net.py", ":build"))
    )
