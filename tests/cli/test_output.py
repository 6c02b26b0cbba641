"""Control codes in file and class names never reach a terminal raw."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest
import typer.main
from PIL import Image

from hpcdl.cli.app import app_for
from hpcdl.cli.output import Commentary
from hpcdl.core.errors import ConfigError, HpcdlError, printable
from hpcdl.core.progress import NullProgress
from tests.conftest import ROOT, CommandLine
from tests.report.synthetic import make_record, write_run

HOSTILE = "a\x1b]0;owned\x07b\x9b31mc\u202ed\u2066e\nf\rg"
COMMAND_FILES = sorted(path for path in (ROOT / "hpcdl" / "cli").glob("*.py") if path.name != "output.py")
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
COMMANDS: dict[str, list[str]] = {
    "a command": [HOSTILE],
    "a flag": ["train", f"--{HOSTILE}", "1"],
    "a value": ["train", "--model", HOSTILE, "--data", HOSTILE, "--batch-size", HOSTILE],
    "a source": ["shard", f"{HOSTILE}/none", "out"],
    "a data folder": ["inspect", f"{HOSTILE}/none"],
    "a run": ["report", f"{HOSTILE}/none", "--out", "report"],
    "a config file": ["train", "--config", f"{HOSTILE}/none.toml"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_error_shows_a_name_and_does_not_obey_it(name: str, ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(COMMANDS[name])
    assert refused.code == 2, refused.err
    assert not RAW.search(refused.err + refused.out), (refused.err, refused.out)
    assert all(line.startswith("hpcdl: ") for line in refused.err.splitlines()), refused.err


def test_class_and_folder_names_are_shown_harmless(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    source, target = tmp_path / HOSTILE, tmp_path / f"out {HOSTILE}"
    for label in (f"x{HOSTILE}", "plain"):
        (source / label).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(np.full((8, 8), number, np.uint8)).save(source / label / f"{number}.png")
    made = ask_hpcdl(["shard", source, target, "--max-ranks", "2"])
    assert made.code == 0, made.err
    for command in (["inspect", target], ["inspect", target, "--verify"], ["inspect", target, "--json"]):
        seen = ask_hpcdl(command)
        assert seen.code == 0, seen.err
        assert not RAW.search(seen.out + seen.err + made.out + made.err), (seen.out, seen.err, made.out, made.err)


def test_a_run_with_a_line_break_in_its_name_stays_one_line(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / f"{name} {HOSTILE}", make_record(n)) for n, name in ((1, "a"), (2, "b")))
    (first / "run.toml").touch()
    commands = {
        "checkpoints": [first],
        "diff": [first, second],
        "report": [first, "--out", tmp_path / HOSTILE, "--format", "html"],
        "predict": [first, second, "--out", tmp_path / HOSTILE],
    }
    for name, words in commands.items():
        shown = ask_hpcdl([name, *words])
        assert shown.code == 0, shown.err
        lines = (shown.out + shown.err).splitlines()
        assert not RAW.search("\n".join(lines)) and not any(line.startswith(("f\\x0dg", "f?g")) for line in lines), (
            lines
        )


def test_errors_keep_their_lines_apart_from_those_in_names() -> None:
    assert str(HpcdlError(f"no such file: {HOSTILE}")) == f"no such file: {printable(HOSTILE)}"
    assert str(ConfigError(["--a: x\x1b", "--b: y\nz"])) == "--a: x?\n--b: y?z"
    assert printable("caf\u00e9 \u65e5\u672c \udcff") == "caf\u00e9 \u65e5\u672c ?"


@pytest.mark.parametrize("path", COMMAND_FILES, ids=lambda path: path.stem)
def test_commands_print_through_one_place(path: Path) -> None:
    calls = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "print"
    ]
    scripts = 1 if path.name == "submit.py" else 0  # a batch script is a file's content, not a message
    assert len(calls) <= scripts, f"{path.name}: use put() or say() in lines {calls}"


QUIET = ("shard", "inspect", "tune-threads", "train", "sweep", "search", "run", "evaluate", "infer", "certify")


@pytest.mark.parametrize("command", QUIET)
def test_commands_with_progress_have_quiet(command: str) -> None:
    parser = typer.main.get_command(app_for([command])).commands[command]  # type: ignore[attr-defined]
    assert {"-q", "--quiet"} in [{*option.opts} for option in parser.params]


@pytest.mark.parametrize(("quiet", "reported"), [(True, ["warning: b"]), (False, ["a", "warning: b"])])
def test_a_quiet_commentary_has_warnings_and_no_bar(
    quiet: bool, reported: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    commentary = Commentary(quiet=quiet)
    commentary.say("a")
    commentary.say("warning: b")
    assert capsys.readouterr().err.splitlines() == reported
    assert isinstance(commentary.progress("c", 1), NullProgress) == quiet


def test_quiet_leaves_the_result(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    plain, quiet = ["shard", "synthetic:mnist", str(folder), "--samples", "4"], ["inspect", str(folder), "--verify"]
    (line,) = ask_hpcdl([*plain, "-q"]).err.splitlines()
    assert line.startswith("1 shard written in ")
    loud, silent = ask_hpcdl(quiet), ask_hpcdl([*quiet, "-q"])
    assert silent.out == loud.out and "name" in silent.out
    assert [line for line in loud.err.splitlines() if line not in silent.err] == [loud.err.splitlines()[-1]]
