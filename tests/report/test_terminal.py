"""The report fits screens of any width, unbroken and complete."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT, CommandLine

STUDY = ROOT / "tests" / "studies" / "five-hosts"
WHOLE = ("127.44 ± 0.95", "4-nodes/failed/003-ring-4w-64b-r1.1", "sync-easgd", "exposed communication")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_word_is_broken(ask_hpcdl: CommandLine, columns: int) -> None:
    told = ask_hpcdl(["report", STUDY, "--format", "terminal"], env={"COLUMNS": str(columns)})
    assert told.code == 0, told.err
    joined = " ".join(told.out.split())
    for piece in WHOLE:
        assert piece in joined, f"{piece!r} is broken at {columns} columns"
    for line in told.out.splitlines():
        longest = max(map(len, line.split()), default=0)
        assert len(line.rstrip()) <= columns or longest > columns - 10, line


def test_published_points_are_left_to_the_files(ask_hpcdl: CommandLine) -> None:
    """Published points would be longer than the study itself; the terminal says where they are."""
    shown = ask_hpcdl(["report", STUDY, "--format", "terminal"])
    assert "rows in the files that --out DIR writes" in shown.out and "Published points" not in shown.out
