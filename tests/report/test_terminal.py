"""The report fits screens of any width, unbroken and complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ROOT, CommandLine

STUDY = ROOT / "tests" / "studies" / "five-hosts"
WHOLE = ("127.44 ± 0.95", "4-nodes/failed/003-ring-4w-64b-r1.1", "sync-easgd", "exposed communication")


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_word_is_broken(ask_hpcdl: CommandLine, columns: int) -> None:
    reported = ask_hpcdl(["report", STUDY, "--format", "terminal"], env={"COLUMNS": str(columns)})
    assert reported.code == 0, reported.err
    joined = " ".join(reported.out.split())
    for piece in WHOLE:
        assert piece in joined, f"{piece!r} is broken at {columns} columns"
    for line in reported.out.splitlines():
        longest = max(map(len, line.split()), default=0)
        assert len(line.rstrip()) <= columns or longest > columns - 10, line


def test_published_points_are_left_to_the_files(ask_hpcdl: CommandLine) -> None:
    """Published points would be longer than the study itself; the terminal says where they are."""
    shown = ask_hpcdl(["report", STUDY, "--format", "terminal"])
    assert "rows in the files that --out DIR writes" in shown.out and "Published points" not in shown.out


def test_the_last_column_of_a_wide_table_is_whole(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A table as wide as the terminal lost its last column: intervals took the width that its numbers needed."""
    table = tmp_path / "noisy.csv"
    rows = [f"ring,resnet50,{n},{n},64,{k},{50 * n * f}" for n in (1, 2, 4, 8) for k, f in enumerate((0.8, 1, 1.2))]
    table.write_text("\n".join(["strategy,model,nodes,ranks,batch_per_rank,repeat,images_per_second", *rows]) + "\n")
    line = ["report", "--import", "csv", table, "--format", "terminal", "--out", tmp_path / "out"]
    reported = ask_hpcdl(line, env={"COLUMNS": "160"})
    assert reported.code == 0, reported.err
    lines = reported.out.split("predicted steps")[1].splitlines()
    head, first = " ".join(lines[:4]), next(line for line in lines if line.startswith(" ring "))
    assert "limited" in head and "held-out" in head and first.rstrip().endswith("%"), lines[:8]
