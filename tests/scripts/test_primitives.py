"""Every primitive on two and three ranks and on one process, case by case; two ranks in the long version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, cases_of, run_script, succeed

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.soak), 3])
def results(
    request: pytest.FixtureRequest, session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, str]]:
    """What each rank reports for each case."""
    folder: Path = tmp_path_factory.mktemp("primitives")
    succeed(run_script(session_hpcdl, HERE / "primitive_cases.py", folder, ranks=request.param, cwd=folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


@pytest.mark.parametrize("case", cases_of("primitive_cases.py"))
def test_primitive(case: str, results: list[dict[str, str]]) -> None:
    for rank, reported in enumerate(results):
        assert reported[case] == "", f"rank {rank}: {reported[case]}"
