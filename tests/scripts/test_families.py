"""Scripts of many families: two and three ranks equal one process, or agree with each other for a documented reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.families import PAGE, SCRIPT, as_promised, families, names, reasons, rows
from tests.scripts.scripts import run_script, succeed

pytestmark = pytest.mark.mpi
QUICK = [f"{family}: {variations[0]}" for family, variations in families().items()]
Said = list[dict[str, str]]


def said_by(hpcdl: CommandLine, folder: Path, ranks: int, scripts: list[str]) -> Said:
    succeed(run_script(hpcdl, SCRIPT, folder, *scripts, ranks=ranks, cwd=folder, timeout_s=1100))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def sample(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Said:
    return said_by(session_hpcdl, tmp_path_factory.mktemp("sample"), 2, QUICK)


@pytest.fixture(scope="module")
def everything(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Said]:
    return {ranks: said_by(session_hpcdl, tmp_path_factory.mktemp(f"on-{ranks}"), ranks, []) for ranks in (2, 3)}


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_one_of_each_family_equals_one_process(sample: Said, name: str) -> None:
    for reported in sample:
        assert as_promised(name, reported[name]), reported[name]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", names())
def test_every_one_ends_as_the_page_says(everything: dict[int, Said], name: str, ranks: int) -> None:
    for reported in everything[ranks]:
        assert as_promised(name, reported[name]), reported[name]


def test_there_are_eighty_scripts_and_each_reason_is_of_one() -> None:
    assert len(set(names())) == len(names()) >= 80
    assert set(reasons()) <= set(names())
    assert not set(QUICK) & set(reasons())


def test_the_page_has_the_table_of_these_scripts() -> None:
    """The page has this table; `python -m tests.scripts.families` writes it after all scripts ended as expected."""
    page = PAGE.read_text()
    assert all(line in page.splitlines() for line in rows()), "run python -m tests.scripts.families"
    assert f"{len(names())} scripts: on 2 ranks" in page
