"""The table of commands agrees with each file, and a command line imports only the code of its command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.main

from hpcdl.cli.app import COMMANDS, app_for
from tests.conftest import ROOT, CommandLine, finish


def names_of(*words: str) -> list[str]:
    return [*typer.main.get_command(app_for(words)).commands]  # type: ignore[attr-defined]


@pytest.mark.parametrize("names", COMMANDS.values(), ids=lambda names: names[0])
def test_a_file_has_the_commands_that_are_documented(names: tuple[str, ...]) -> None:
    for name in names:
        assert names_of("-v", name, "--json") == [*names]


@pytest.mark.parametrize("words", [(), ("--help",), ("--help", "train"), ("trian", "--model", "lenet")], ids=" ".join)
def test_where_no_command_is_named_there_are_all(words: tuple[str, ...]) -> None:
    assert set(names_of(*words)) == {name for names in COMMANDS.values() for name in names}


def test_a_command_is_loaded_without_the_others() -> None:
    program = (
        "import sys; from hpcdl.cli.main import run; run(['train', '--help'])\n"
        "print([name for name in sys.modules if name.startswith('hpcdl.cli.') and name.count('.') == 3])"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert finished.stdout.splitlines()[-1] == "['hpcdl.cli.training.train']"


DROPPED = """
import sys, time, weakref
sys.argv = ["hpcdl", "runs"]
import hpcdl.cli.main as command, hpcdl.core.processes.streams
class Thing: pass
def app_for(arguments):
    def app(*args, **options):
        thing = Thing()
        watched = weakref.ref(thing, lambda _: interrupted())
        del thing
        for _ in range(100):
            time.sleep(0.05)
        return 0
    return app
def interrupted():
    raise KeyboardInterrupt
import hpcdl.cli.app
hpcdl.cli.app.app_for = app_for
command.main()
"""


def test_ctrl_c_that_python_drops_in_a_callback_ends_the_command(tmp_path: Path) -> None:
    """Ctrl-C ends a command even if Python drops it in a callback, such as an import's."""
    finished = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert finished.returncode == 130
    assert finished.stderr.splitlines() == ["hpcdl: stopped by Ctrl-C"]


def test_ctrl_c_in_the_middle_of_a_command_is_reported_in_one_line(run_hpcdl: CommandLine) -> None:
    process = run_hpcdl.start(["report", ROOT / "tests" / "studies" / "five-hosts", "--out", run_hpcdl.home / "out"])
    while process.poll() is None and "numpy" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    finished = finish(process)
    assert finished.code == 130
    assert finished.err.splitlines()[-1:] == ["hpcdl: stopped by Ctrl-C"] and "Traceback" not in finished.err


def test_a_current_folder_that_was_removed_is_reported(tmp_path: Path) -> None:
    line = f"cd {tmp_path}/gone && rmdir ../gone && exec {sys.executable} -P -m hpcdl examples digits"
    (tmp_path / "gone").mkdir()
    finished = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == "hpcdl: the current folder was removed; `cd` to one that is there\n"


LOADING = """
import os, runpy, signal, sys

class Strike:
    def find_spec(name, path=None, target=None):
        if name == "hpcdl.core.units":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Strike)
sys.argv = ["hpcdl", "models"]
runpy.run_module("hpcdl", run_name="__main__")
"""


def test_ctrl_c_while_the_command_loads_ends_it_without_a_word() -> None:
    finished = subprocess.run([sys.executable, "-c", LOADING], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stdout, finished.stderr) == (-signal.SIGINT, "", "")


ENDING = """
import os, signal, sys

class Last:
    def __del__(self, kill=os.kill, number=os.getpid(), what=signal.SIGINT):
        kill(number, what)

last = Last()
sys.argv = ["hpcdl", "--version"]
from hpcdl.cli.main import main
main()
"""


def test_ctrl_c_while_python_ends_makes_no_failure_of_what_is_done() -> None:
    """Ctrl-C while Python exits does not turn finished work into a failure (exit code -2)."""
    finished = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False)
    assert (finished.returncode, finished.stderr) == (0, "") and finished.stdout


def test_an_unknown_command_of_a_group_is_answered_with_its_commands(ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(["config", "train"])
    assert refused.code == 2 and not refused.out
    assert refused.err == "hpcdl: No such command 'train'; `hpcdl config` has show; see `hpcdl config --help`\n"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["train", "--epochs", "=", "5"], "type --option=VALUE"),
        (["shard", "a", "b", "--split", "train=0.8,", "val=0.2"], "type it without, or in quotes"),
        (["train", "lenet", "shards"], "as in --option VALUE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_words_too_many_are_answered_with_what_to_type(words: list[str], remedy: str, ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(words)
    assert refused.code == 2 and not refused.out
    assert remedy in refused.err and refused.err.count("\n") == 1


def test_an_option_without_its_value_is_answered_with_the_help_of_its_command(ask_hpcdl: CommandLine) -> None:
    for words in (["shard", "a", "b", "--normalise"], ["report", "--import", "results.csv"]):
        refused = ask_hpcdl(words)
        assert refused.code == 2 and f"see `hpcdl {words[0]} --help`" in refused.err
