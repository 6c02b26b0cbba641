"""The command line as a whole: quick to start, helpful everywhere, and clear about mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcdl import __version__
from tests.conftest import CommandLine

HEAVY = {"tensorflow", "keras", "mpi4py", "h5py", "numpy", "scipy", "matplotlib", "rich", "PIL", "h5netcdf"}


PROBE = """
import contextlib, io, json, sys
with contextlib.redirect_stdout(io.StringIO()):
    exec(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that a fresh Python has loaded after `statement`."""
    line = [sys.executable, "-c", PROBE, statement]
    finished = subprocess.run(line, capture_output=True, text=True, check=True, timeout=300)
    return {name.split(".")[0] for name in json.loads(finished.stdout)}


@pytest.mark.parametrize(
    "statement",
    [
        "import hpcdl",
        "from hpcdl.cli.main import run; run(['--help'])",
        "from hpcdl.cli.main import run; run(['train', '--help'])",
        "from hpcdl.cli.main import run; run(['models', '--json'])",
        "from hpcdl.cli.main import run; run(['strategies'])",
        "from hpcdl.cli.main import run; run(['config', 'show'])",
    ],
)
def test_starts_without_heavy_libraries(statement: str) -> None:
    assert not loaded_by(statement) & HEAVY


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command with its path, groups included, from the app itself."""
    import typer.main

    from hpcdl.cli.app import app_for

    waiting: list[tuple[tuple[str, ...], Any]] = [((), typer.main.get_command(app_for()))]
    while waiting:
        path, command = waiting.pop()
        yield path, command
        waiting += [((*path, name), member) for name, member in getattr(command, "commands", {}).items()]


ALL = sorted(commands(), key=lambda item: item[0])


def test_the_app_has_its_commands() -> None:
    names = {" ".join(path) for path, _ in ALL}
    assert {"shard", "train", "report", "models", "strategies", "config show"} <= names


@pytest.mark.parametrize("path, command", ALL, ids=[" ".join(("hpcdl", *path)) for path, _ in ALL])
def test_every_command_explains_itself(path: tuple[str, ...], command: Any) -> None:
    line = " ".join(("hpcdl", *path))
    assert command.help, f"{line} has no help"
    if not getattr(command, "commands", None) or not path:
        epilog = command.epilog or ""
        assert epilog.startswith("Example: ") and line in epilog, f"{line} has no example of itself"
    for parameter in command.params:
        if getattr(parameter, "opts", [""])[0].startswith("-"):
            assert parameter.help, f"{line} {parameter.opts[0]} has no help"


@pytest.mark.parametrize("path, command", ALL, ids=[" ".join(("hpcdl", *path)) for path, _ in ALL])
def test_one_flag_has_one_meaning(path: tuple[str, ...], command: Any) -> None:
    """A flag that is a switch on one command takes no value on another."""
    for parameter in command.params:
        for name in getattr(parameter, "opts", []):
            if name.startswith("--"):
                switches = {
                    item.is_flag for _, other in ALL for item in other.params if name in getattr(item, "opts", [])
                }
                assert len(switches) == 1, f"{name} is a switch on one command and takes a value on another"


def test_help_is_plain_and_says_where_to_go(run_hpcdl: CommandLine) -> None:
    finished = run_hpcdl(["train", "--help"])
    assert finished.code == 0
    assert "--strategy" in finished.out and "Example: hpcdl train" in " ".join(finished.out.split())
    assert "\x1b" not in finished.out and "╭" not in finished.out


def test_version_and_module(run_hpcdl: CommandLine) -> None:
    finished = run_hpcdl(["--version"])
    assert (finished.code, finished.out, finished.err) == (0, f"hpcdl {__version__}\n", "")
    script = Path(sys.executable).with_name("hpcdl")
    out = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, timeout=300).stdout
    assert out == finished.out


@pytest.mark.parametrize(
    "arguments",
    [["trian"], ["train", "--no-such-flag"], ["train", "--ranks", "0"], ["config", "shwo"], ["models", "surplus"]],
    ids=" ".join,
)
def test_a_slip_is_one_line_and_exit_2(ask_hpcdl: CommandLine, arguments: list[str]) -> None:
    finished = ask_hpcdl(arguments)
    assert finished.code == 2, finished.err
    assert finished.out == ""
    lines = finished.err.splitlines()
    assert all(line.startswith("hpcdl: ") for line in lines), finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(run_hpcdl: CommandLine, shell: str) -> None:
    finished = run_hpcdl([], env={"_HPCDL_COMPLETE": f"source_{shell}"})
    assert finished.code == 0, finished.err
    assert "_HPCDL_COMPLETE" in finished.out and "hpcdl" in finished.out


def test_completion_knows_the_commands(run_hpcdl: CommandLine) -> None:
    finished = run_hpcdl([], env={"_HPCDL_COMPLETE": "complete_bash", "COMP_WORDS": "hpcdl tr", "COMP_CWORD": "1"})
    assert finished.out.split() == ["train", "trace"]


def test_a_closed_pipe_is_no_traceback(run_hpcdl: CommandLine) -> None:
    line = f"{sys.executable} -m hpcdl models --json | head -c 1"
    finished = subprocess.run(
        ["bash", "-c", line], env=run_hpcdl.environment, capture_output=True, text=True, timeout=300
    )
    assert finished.stdout == "{" and "Traceback" not in finished.stderr and "Error" not in finished.stderr
