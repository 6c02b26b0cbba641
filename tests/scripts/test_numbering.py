"""Words and classes that each rank numbers in an order of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcdl.scripts.fit.numbering import _digest, _numbers_in, _verdict
from tests.conftest import CommandLine
from tests.scripts.scripts import succeed


@pytest.mark.parametrize(
    ("value", "taken"),
    [
        ({"cat": 0, "dog": 1}, True),
        ({"the": 2, "a": 1, "of": 3}, True),
        ({"epochs": 5, "batch": 32}, False),
        ({"one": 0}, False),
        ({"my rank": 0, "peer": 1}, False),
        ({0: "cat", 1: "dog"}, False),
        ({"shuffle": False, "cache": True}, False),
        ({"loss": 0.0, "accuracy": 1.0}, False),
        ({"cat": 0, "dog": "1"}, False),
        ({"cat": 0, 5: 1}, False),
        (["cat", "dog"], False),
    ],
    ids=str,
)
def test_what_numbers_words_is_told_from_other_dictionaries(value: Any, taken: bool) -> None:
    assert (_numbers_in(value) is not None) == taken


def test_names_that_are_no_utf_8_are_compared() -> None:
    assert _digest({"\udce9": 0, "a": 1}) == _digest({"a": 1, "\udce9": 0}) != _digest({"a": 0, "\udce9": 1})


def test_other_words_of_a_rank_are_no_difference() -> None:
    assert _verdict("index", [{"a.png": 0, "b.png": 1}, {"c.png": 0, "d.png": 1}]) == ""
    text = _verdict("index", [{"cat": 0, "dog": 1}, {"cat": 0, "dog": 1}, {"bird": 0, "cat": 1}])
    assert text.startswith("index numbers 'cat' 0 on rank 0 and 1 on rank 2, ")


SCRIPT = """
import sys
import hpcdl
hpcdl.init()
import keras, numpy as np
def main():
    x = np.random.default_rng(3).normal(size=(64, 4))
    names = np.array(["no", "yes"])[(x[:, 0] > 0).astype(int)]
    part = slice(hpcdl.rank(), None, 2)
    words = ["no", "yes"][:: 1 if sys.argv[1] == "sorted" or hpcdl.rank() else -1]
    number = {word: at for at, word in enumerate(words)}
    targets = np.array([number[name] for name in names[part]])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(hpcdl.DistributedOptimizer("sgd"), "binary_crossentropy")
    model.fit(x[part], targets, verbose=0)
main()
"""


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["as they come", pytest.param("sorted", marks=pytest.mark.long)])
def test_classes_that_each_rank_has_numbered_are_named(session_hpcdl: CommandLine, tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = succeed(session_hpcdl(["run", "--ranks", "2", "--run-dir", tmp_path / "run", tmp_path / "script.py", how]))
    assert ended.err.count("hpcdl: warning: number numbers '") == (how == "as they come"), ended.err
