"""Metrics that are no sums: two and three ranks have the values of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, keys_of, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPT = "gathered_cases.py"
CASES = keys_of(SCRIPT, "CASES")
SLOW = ("sums that say so leave no warning", "a ring of slots", "a metric by its name", "a maximum in compile")


def found(hpcdl: CommandLine, folder: Path, cases: list[str], ranks: int) -> list[dict[str, str]]:
    succeed(run_script(hpcdl, HERE / SCRIPT, folder, *cases, ranks=ranks, cwd=folder, timeout_s=600))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def sample(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return found(session_hpcdl, tmp_path_factory.mktemp("sample"), [one for one in CASES if one not in SLOW], ranks=2)


@pytest.fixture(scope="module", params=[2, 3])
def everything(
    request: pytest.FixtureRequest, session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    return found(session_hpcdl, tmp_path_factory.mktemp("everything"), CASES, ranks=request.param)


@pytest.mark.parametrize("case", [one for one in CASES if one not in SLOW])
def test_the_result_is_that_of_one_process(sample: list[dict[str, str]], case: str) -> None:
    assert [reported[case] for reported in sample] == ["", ""]


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES)
def test_every_one_is_that_of_one_process(everything: list[dict[str, str]], case: str) -> None:
    assert {reported[case] for reported in everything} == {""}
