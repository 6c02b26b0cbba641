"""Kinds of variables, and what callbacks do inside an epoch, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.scripts.scripts import HERE, run_script, succeed

pytestmark = pytest.mark.mpi
INSIDE = [
    "evaluate",
    "evaluate at the end too",
    "evaluate on rank 0",
    "predict on rank 0",
    "a second fit",
    "a second fit of the model itself",
    "evaluate over the ranks",
]


def test_variables_are_averaged_summed_compared_or_a_ranks_own_by_their_kind(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "kinds_script.py", ranks=2, cwd=tmp_path))
    assert finished.out.count("as it should be") == 2
    (line,) = [line for line in finished.err.splitlines() if "no gradient moves them" in line]
    assert line.startswith("hpcdl: kept/usual, kept/queue: ") and "hpcdl.combine(variable" in line


@pytest.fixture(scope="module")
def inside(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What both ranks say of each case."""
    folder = tmp_path_factory.mktemp("inside")
    return succeed(run_script(session_hpcdl, HERE / "inside_script.py", ranks=2, cwd=folder)).out


@pytest.mark.parametrize("case", INSIDE)
def test_what_a_callback_does_inside_an_epoch_leaves_the_fit_as_it_is(inside: str, case: str) -> None:
    found = sorted(re.findall(rf"^CASE (\d) {case}: (.*)$", inside, re.MULTILINE))
    assert found == [("0", "as without"), ("1", "as without")]


def test_data_are_shuffled_alike_and_layers_adapted_over_all_ranks(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "data_script.py", ranks=2, cwd=tmp_path))
    assert finished.out.count("as it should be") == 2


def test_every_way_to_save_is_one_ranks_and_whole(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "saving_script.py", ranks=2, cwd=tmp_path))
    assert finished.out.count("as it should be []") == 2


def test_a_first_pass_with_a_ranks_own_weights_is_warned_of(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    finished = succeed(run_script(session_hpcdl, HERE / "first_pass_script.py", ranks=2, cwd=tmp_path))
    (line,) = [line for line in finished.err.splitlines() if line.startswith("hpcdl: ")]
    assert "first forward pass used each rank's own" in line and "hpcdl.broadcast_variables" in line
    assert finished.err.index(line) < finished.err.index("broadcast True")
