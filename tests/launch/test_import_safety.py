"""Nothing is imported from the current folder, and no code of another user's run without an explicit request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdl.core.errors import UsageError
from hpcdl.run.rundir import CONFIG_FILE, MODEL_FILE, check_trusted
from tests.conftest import DIGITS, ROOT, CommandLine

TRAINED = ["--model", "lenet", "--batch-size", "8", "--steps", "2", "--profile", "none"]
COMMANDS = {
    "train": ["train", "--data", "synthetic:mnist", *TRAINED, "--strategy", "ring", "--ranks", "2", "--run-dir", "run"],
    "shard": ["shard", str(DIGITS), "shards", "--image-size", "28", "--shards", "2", "--workers", "2"],
    "bench": ["bench", "step", *TRAINED, "--strategy", "ring", "--ranks", "2", "--warmup-steps", "1"],
}


@pytest.mark.long
@pytest.mark.mpi
@pytest.mark.parametrize("command", ["train", "shard", pytest.param("bench", marks=pytest.mark.soak)])
def test_files_in_the_current_folder_change_nothing(session_hpcdl: CommandLine, tmp_path: Path, command: str) -> None:
    (tmp_path / "hpcdl").mkdir()
    for path in (tmp_path / "random.py", tmp_path / "hpcdl" / "__init__.py"):
        path.write_text(f"import pathlib, sys\npathlib.Path({str(tmp_path / 'seen')!r}).touch()\nsys.exit('planted')\n")
    line = [sys.executable, "-P", "-m", "hpcdl", *COMMANDS[command]]
    environment = {**session_hpcdl.environment, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "seen").exists()


def test_own_programs_are_started_in_one_way() -> None:
    """hpcdl starts its Python programs with -P, which keeps the current folder off their path."""
    direct = re.compile(r'(sys\.executable|python),\s*"-(?!P)')
    found = [path for path in (ROOT / "hpcdl").rglob("*.py") if direct.search(path.read_text())]
    assert found == []


@pytest.mark.parametrize("name", [".", CONFIG_FILE, MODEL_FILE])
def test_another_users_run_must_be_trusted(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (CONFIG_FILE, MODEL_FILE):
        (tmp_path / file).touch()
    check_trusted(tmp_path, trust=False)
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    else:
        os.chown(tmp_path / name, 4711, -1)
    with pytest.raises(UsageError, match="add --trust"):
        check_trusted(tmp_path, trust=False)
    check_trusted(tmp_path, trust=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [["evaluate"], ["infer"], ["export", "--to", "keras"], ["train", "--resume", "--run-dir"]]
)
def test_commands_ask_for_trust(run_hpcdl: CommandLine, tmp_path: Path, command: list[str]) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    run = tmp_path / "run"
    run.mkdir()
    (run / CONFIG_FILE).write_text('model = "planted.py:build"\n')
    os.chown(run / CONFIG_FILE, 4711, -1)
    behind = {
        "evaluate": ["--data", "synthetic:mnist"],
        "infer": ["--data", "synthetic:mnist", "--out", tmp_path / "out"],
        "export": [tmp_path / "out"],
        "train": [],
    }[command[0]]
    refused = run_hpcdl([*command, run, *behind])
    assert (refused.code, len(refused.err.splitlines())) == (2, 1), refused.err
    assert "belongs to user 4711" in refused.err and "add --trust" in refused.err
    assert "add --trust" not in run_hpcdl([*command, run, *behind, "--trust"]).err
