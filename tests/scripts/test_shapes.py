"""Layers by {static, dynamic} batch and {dense, ragged, sparse} input: two ranks equal one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, keys_of, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPT = "shape_cases.py"
LAYERS = [*keys_of(SCRIPT, "LAYERS"), *keys_of(SCRIPT, "EMBEDDED")]
CASES = [
    *(f"{name}, {batch} batch, dense" for name in LAYERS for batch in ("static", "dynamic")),
    *(f"loop, {batch} batch, {kind}" for kind in ("ragged", "sparse") for batch in ("static", "dynamic")),
    "arrays",
    "refused",
]
QUICK = (
    "LSTM, dynamic batch, dense",
    "Embedding, Dense, dynamic batch, dense",
    "loop, dynamic batch, ragged",
    "loop, dynamic batch, sparse",
    "refused",
)
"""The other cases run in the long version."""


def found(hpcdl: CommandLine, folder: Path, cases: list[str]) -> list[dict[str, str]]:
    """Return what each of two ranks reports for each case."""
    succeed(run_script(hpcdl, HERE / SCRIPT, folder, *cases, ranks=2, cwd=folder, timeout_s=900))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def sample(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return found(session_hpcdl, tmp_path_factory.mktemp("sample"), list(QUICK))


@pytest.fixture(scope="module")
def others(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return found(session_hpcdl, tmp_path_factory.mktemp("others"), [case for case in CASES if case not in QUICK])


@pytest.mark.parametrize("case", QUICK)
def test_a_sample_equals_one_process(sample: list[dict[str, str]], case: str) -> None:
    assert [reported[case] for reported in sample] == ["", ""]


@pytest.mark.soak
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK])
def test_every_layer_equals_one_process(others: list[dict[str, str]], case: str) -> None:
    assert [reported[case] for reported in others] == ["", ""]


def test_the_sample_has_every_kind_of_input() -> None:
    assert {case.rpartition(", ")[2] for case in QUICK} >= {"dense", "ragged", "sparse"} and set(QUICK) < set(CASES)
