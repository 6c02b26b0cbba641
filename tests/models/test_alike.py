"""Ranks whose function builds another network are named, and a network's own random numbers are no difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from hpcdl.comm.threads import run
from hpcdl.core.errors import UsageError
from hpcdl.models.alike import difference
from tests.conftest import CommandLine


class Untold(layers.Layer):
    """A layer that Keras cannot save."""

    def __init__(self, size: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self.size = size


DRAWING = """
import keras
import numpy as np


def build():
    inner = keras.layers.Dense(np.random.randint(1, 1000))
    return keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), inner, keras.layers.Dense(10)])
"""


def network(*inner: Any) -> keras.Model:
    return keras.Sequential([keras.Input((6, 5)), *inner, layers.Flatten(), layers.Dense(4)])


DIFFERENT: dict[str, tuple[Callable[[int], Any], str]] = {
    "activation": (lambda rank: layers.Dense(3, activation=["relu", "tanh"][rank]), "is 'relu' and 'tanh'"),
    "rate": (lambda rank: layers.Dropout(0.1 * (1 + rank)), "rate of layer .* is 0.1 and 0.2"),
    "kind": (lambda rank: [layers.ReLU(), layers.ELU()][rank], "is ReLU and ELU"),
    "in a wrapper": (
        lambda rank: layers.TimeDistributed(layers.Dense(2, activation=[None, "tanh"][rank])),
        "config.activation of layer .* and 'tanh'"
    ),
    "constants": (lambda rank: layers.Normalization(mean=[0.5 + rank] * 5, variance=[1.0] * 5), "mean of layer"),
}  # fmt: skip
ALIKE: dict[str, Callable[[int], Any]] = {
    "random layers": lambda _: keras.Sequential([layers.Dropout(0.5), layers.GaussianNoise(0.1)]),
    "seeds": lambda rank: layers.Dropout(0.5, seed=rank),
    "initializers": lambda rank: layers.Dense(3, kernel_initializer=keras.initializers.GlorotUniform(seed=rank)),
    "names": lambda rank: layers.Dense(3, name=f"mine{rank}"),
    "function": lambda _: layers.Lambda(lambda values: values * 2),
    "not told": lambda rank: Untold(np.zeros(2 + rank)),
}


def found(make: Callable[[int], Any], num_ranks: int = 2) -> list[list[str]]:
    models = [network(make(rank)) for rank in range(num_ranks)]
    return run(num_ranks, lambda group: difference(models[group.rank], "net.py:build", group))


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_setting_that_differs_is_named_on_all_ranks(name: str) -> None:
    make, reported = DIFFERENT[name]
    (first,), (second,) = found(make)
    assert first == second and first.startswith("model 'net.py:build' differs between rank 0 and rank 1: ")
    assert re.search(reported, first) and len(first) < 300


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_each_process_own_is_no_difference(name: str) -> None:
    assert found(ALIKE[name]) == [[], []]


def test_weights_of_other_shapes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"between rank 0 and rank 2: .*kernel is \(5, 3\) float32 and \(5, 4\) "):
        found(lambda rank: layers.Dense(3 + rank // 2), num_ranks=3)
    with pytest.raises(UsageError, match="it has 4 and 6 weights"):
        found(lambda rank: keras.Sequential([layers.Dense(4), *([layers.Dense(4)] if rank else [])]))


def test_a_function_that_draws_at_random_is_named(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(DRAWING)
    line = ["--model", "net.py:build", "--data", "synthetic:mnist@200", "--steps", "2", "--ranks", "2"]
    done = run_hpcdl(["train", *line, "--run-dir", "run"], cwd=tmp_path)
    assert done.code == 2 and "differs between rank 0 and rank 1: " in done.err
    assert "killed" not in done.err and not (tmp_path / "run").exists()
