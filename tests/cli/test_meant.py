"""Options under other programs' names are answered with what they are called here."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer.main

from hpcdl.cli.app import app_for
from hpcdl.config.other_names import SAME
from tests.conftest import CommandLine


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train --network lenet", "; here it is --model;"),
        ("train --nproc_per_node=2", "; here it is --ranks;"),
        ("submit --nproc-per-node 2", "; here it is --ranks-per-node;"),
        ("run -np 2 fit.py", "-np is mpiexec's; type --ranks 2 or -n 2"),
        ("train --save-every 100", "; here it is --checkpoint-every TIME, as 10m;"),
        ("report runs --output page", "; here it is --out;"),
        ("train --image-size 28", "; `hpcdl shard` has it;"),
        ("train --nodes 2", "; `hpcdl submit` has it;"),
        ("train --epcohs 2", " (Possible options: --epochs);"),
        ("train --verbose", "; it stands before the command: hpcdl -v train;"),
        ("train --frobnicate 2", "No such option: --frobnicate; see"),
    ],
)
def test_other_names_of_options_are_known(line: str, said: str, ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(line.split())
    assert refused.code == 2 and said in refused.err, refused.err


def test_other_names_in_files_and_with_set_are_known(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    line = ["train", "--model", "lenet", "--data", "synthetic:mnist"]
    assert "--set: unknown key 'lr'; here it is learning-rate" in ask_hpcdl([*line, "--set", "lr=0.1"]).err
    (tmp_path / "run.toml").write_text("max_steps = 20\n")
    assert "unknown key 'max-steps'; here it is steps" in ask_hpcdl([*line, "--config", tmp_path / "run.toml"]).err
    (tmp_path / "search.toml").write_text("objective = 'loss'\n[space]\nlr = [0.1, 0.2]\n")
    refused = ask_hpcdl(["search", tmp_path / "search.toml", "--out", tmp_path / "out"])
    assert refused.code == 2 and "space: unknown key 'lr'; here it is learning-rate" in refused.err


def test_words_of_scripts_and_jobs_are_their_own(ask_hpcdl: CommandLine) -> None:
    refused = ask_hpcdl(["run", "gone.py", "-np", "2"])
    assert "gone.py is not there" in refused.err
    assert "mpiexec's" not in ask_hpcdl(["submit", "--dry-run", "--", "mpiexec", "-np", "2", "program"]).err


def test_what_is_advised_is_an_option_of_a_command() -> None:
    commands = typer.main.get_group(app_for()).commands
    options = {name for command in commands.values() for parameter in command.params for name in parameter.opts}
    assert {f"--{key}" for key in SAME} <= options
