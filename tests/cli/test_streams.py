"""The command line with closed, full or unread output, and in a locale with ASCII letters only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CommandLine, patience

TRAIN = "train --model lenet --data synthetic:mnist@200 --ranks 1 --steps 20 --profile none --run-dir"


def in_shell(command: CommandLine, line: str, cwd: Path, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a line of bash in which $H is hpcdl; the exit code is that of the first command of a pipe."""
    program = f'H="{sys.executable} -P -m hpcdl"; {line}; exit ${{PIPESTATUS[0]}}'
    environment = {name: value for name, value in command.environment.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", program], cwd=cwd, env=environment | (env or {}), capture_output=True, timeout=patience(300)
    )  # fmt: skip
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.long
@pytest.mark.parametrize("words", ["--help", "--version", "train --help", "models", "strategies --json", "node show"])
def test_what_cannot_be_printed_is_reported_and_what_nobody_reads_is_not(
    words: str, session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    code, _, err = in_shell(session_hpcdl, f"$H {words} >/dev/full", tmp_path)
    (line,) = [line for line in err.splitlines() if line.startswith("hpcdl: ")]
    assert code == 1 and "standard output cannot be written: No space left on device" in line
    code, _, err = in_shell(session_hpcdl, f"$H {words} | true", tmp_path)
    assert code == 0 and "hpcdl: " not in err and "Traceback" not in err
    for closed in ("2>&-", ">&-", "<&- >&- 2>&-", "2>/dev/full"):
        assert in_shell(session_hpcdl, f"$H {words} {closed}", tmp_path)[0] == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [("submit --dry-run -- train --model lenet --data synthetic:mnist", 1), ("infer run --data data --out out", 0)],
)
def test_a_full_disk_fails_what_only_prints(words: str, code: int, session_hpcdl: CommandLine, tmp_path: Path) -> None:
    """A job script that was cut short is no success; outputs that `infer` has written are one."""
    program = (
        f"import sys; from hpcdl.cli import main; sys.argv[1:] = {words.split()}\n"
        "if sys.argv[1] == 'infer': main.run = lambda words: print('done') or 0\n"
        "main.main()"
    )
    done = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" >/dev/full', sys.executable, program],
        cwd=tmp_path, env=session_hpcdl.environment, capture_output=True, text=True, timeout=patience(100),
    )  # fmt: skip
    assert done.returncode == code and "standard output cannot be written" in done.stderr, done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("redirected", "code"),
    [
        ("<&- >&- 2>&-", 0),
        ("2>&1 | head -1", 0),
        ("--json >/dev/full", 1),
        *(pytest.param(redirected, 0, marks=pytest.mark.soak) for redirected in ("2>&-", ">/dev/full")),
    ],
)
def test_a_training_runs_to_its_end_whatever_becomes_of_its_output(
    redirected: str, code: int, session_hpcdl: CommandLine, tmp_path: Path
) -> None:
    ended, _, err = in_shell(session_hpcdl, f"$H {TRAIN} run {redirected}", tmp_path)
    assert ended == code, err
    assert json.loads((tmp_path / "run" / "record.json").read_text())["status"] == "finished"
    assert ("standard output cannot be written" in err) == ("/dev/full" in redirected)


@pytest.mark.mpi
@pytest.mark.parametrize("forced", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_names_are_utf_8_in_every_locale(
    forced: dict[str, str], session_hpcdl: CommandLine, tmp_path: Path
) -> None:  # fmt: skip
    (tmp_path / "größe.py").write_text("import sys, hpcdl\nhpcdl.init()\nprint(sys.argv[1], hpcdl.rank())\n", "utf-8")
    code, out, err = in_shell(session_hpcdl, "$H run --ranks 2 --run-dir lauf-é größe.py ärg", tmp_path, forced)
    assert code == 0, err
    assert {"ärg 0", "ärg 1"} <= set(out.splitlines())
    record = json.loads((tmp_path / "lauf-é" / "record.json").read_text("utf-8"))
    assert "größe" in json.dumps(record, ensure_ascii=False)
    code, _, err = in_shell(session_hpcdl, "$H run --run-dir other größe.py $'a\\xff'", tmp_path, forced)
    assert code == 2 and len(err.splitlines()) == 1 and "argument 1" in err and not (tmp_path / "other").exists()
