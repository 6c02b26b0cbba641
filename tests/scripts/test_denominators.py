"""Losses that are means over weights or unmasked values: two and three ranks equal one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, keys_of, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPT = "denominator_cases.py"
CASES = keys_of(SCRIPT, "CASES")
QUICK = (
    "mean over weights",
    "sum of unmasked values",
    "mask of an embedding",
    "two outputs, one masked",
    "a number for each sample",
)


def found(hpcdl: CommandLine, folder: Path, cases: list[str], ranks: int) -> list[dict[str, str]]:
    """What each rank reports for each case."""
    succeed(run_script(hpcdl, HERE / SCRIPT, folder, *cases, ranks=ranks, cwd=folder, timeout_s=600))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def sample(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return found(session_hpcdl, tmp_path_factory.mktemp("sample"), list(QUICK), ranks=2)


@pytest.fixture(scope="module", params=[2, 3])
def everything(
    request: pytest.FixtureRequest, session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    return found(session_hpcdl, tmp_path_factory.mktemp("everything"), CASES, ranks=request.param)


@pytest.mark.parametrize("case", QUICK)
def test_weights_and_loss_equal_one_process(sample: list[dict[str, str]], case: str) -> None:
    assert [reported[case] for reported in sample] == ["", ""]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_every_one_equals_one_process(everything: list[dict[str, str]], case: str) -> None:
    assert {reported[case] for reported in everything} == {""}
