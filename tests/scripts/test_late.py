"""hpcdl.State with a model that has no weights yet, or other weights on each rank; and the epochs that it counts."""

from __future__ import annotations

import json

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, keys_of, run_script, succeed

pytestmark = pytest.mark.mpi
SCRIPT = "late_cases.py"


@pytest.fixture(scope="module")
def found(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("late")
    succeed(run_script(session_hpcdl, HERE / SCRIPT, folder, ranks=2, cwd=folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", keys_of(SCRIPT, "CASES"))
def test_it_continues_where_it_was(found: list[dict[str, str]], case: str) -> None:
    assert [reported[case] for reported in found] == ["", ""]
