"""An engine or library as an axis of a study reaches the ranks, is in their records and separates their runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CommandLine

MATRIX = """
repeats = 1
[matrix]
model = ["lenet"]
data = ["synthetic:mnist"]
strategy = ["single"]
workers = [1]
batch-size = [8]
{axis}
[train]
steps = 4
warmup-steps = 1
"""


def swept(command: CommandLine, folder: Path, axis: str, **environment: str) -> dict[str, dict[str, Any]]:
    """Return the records of a study over this axis, by its value."""
    (folder / "study.toml").write_text(MATRIX.format(axis=axis))
    line = ["sweep", folder / "study.toml", "--out", folder / "out"]
    finished = command(line, env=environment, timeout_s=300)
    assert finished.code == 0, finished.err
    records = [json.loads(path.read_text()) for path in sorted((folder / "out" / "runs").glob("*/record.json"))]
    return {record["config"][axis.split()[0]]: record for record in records}


@pytest.mark.mpi
def test_onednn_on_and_off_are_two_settings_of_a_study(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    found = swept(session_hpcdl, tmp_path, 'onednn = ["on", "off"]')
    assert {value: record["environment"]["TF_ENABLE_ONEDNN_OPTS"] for value, record in found.items()} == {
        "on": "1",
        "off": "0",
    }
    reported = session_hpcdl(["report", tmp_path / "out", "--out", tmp_path / "report", "--format", "json"])
    assert reported.code == 0, reported.err
    rows = json.loads((tmp_path / "report" / "report.json").read_text())["scaling"]
    assert sorted(row["settings"]["onednn"] for row in rows) == ["off", "on"] and [row["n"] for row in rows] == [1, 1]


@pytest.mark.mpi
def test_an_allocator_is_preloaded_and_one_that_cannot_be_is_reported(
    session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a compiler is what makes the library of this test"
    empty = tmp_path / "empty.c"
    empty.write_text("int nothing_of_an_allocator;\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", libraries / "libjemalloc.so.2", empty], check=True)
    (libraries / "libtcmalloc_minimal.so.4").write_text("no library")
    found = swept(session_hpcdl, tmp_path, 'allocator = ["jemalloc", "tcmalloc"]', HPCDL_PRELOAD_PATH=str(libraries))
    assert {record["environment"]["HPCDL_ALLOCATOR"] for record in found.values()} == {"jemalloc", "tcmalloc"}
    reported = {name: [text for text in record["warnings"] if "allocator" in text] for name, record in found.items()}
    assert reported["jemalloc"] == [] and "its library was not loaded" in reported["tcmalloc"][0]


def test_a_library_that_is_not_here_is_refused_by_name(session_hpcdl: CommandLine, tmp_path: Path) -> None:
    if any(Path("/usr/lib").glob("*/libtcmalloc*.so.4")):
        pytest.skip("this machine has tcmalloc")
    (tmp_path / "study.toml").write_text(MATRIX.format(axis='allocator = ["default", "tcmalloc"]'))
    for line in (
        ["sweep", tmp_path / "study.toml", "--out", tmp_path / "out"],
        ["train", "--model", "lenet", "--data", "synthetic:mnist", "--steps", "1", "--allocator", "tcmalloc"],
    ):
        refused = session_hpcdl(line)
        assert refused.code == 2 and "--allocator tcmalloc: this node has no libtcmalloc_minimal" in refused.err
        assert "default" in refused.err and len(refused.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
