"""Help is grouped, with short names and shell completion."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest

from hpcdl.cli.app import COMMANDS, CONTENTS
from hpcdl.cli.groups import MOST_USED, completer
from hpcdl.config.load import all_settings
from hpcdl.config.schema import TrainConfig
from hpcdl.models.table import MODELS
from hpcdl.node.machines import machine_names
from hpcdl.strategies.table import listed_strategies
from tests.conftest import CommandLine

GROUPS = ["bench", "node", "config", "env"]
HEADINGS = ["Most used", "Data", "Model", "Optimisation", "Strategy", "Checkpoint", "Safety", "Machine"]


def sections(text: str) -> dict[str, list[str]]:
    """Return the long flags under each heading."""
    parts = re.split(r"^(\S.*):$", text, flags=re.MULTILINE)[1:]
    flags = re.compile(r"^  (?:-\w, )?--([\w-]+)", re.MULTILINE)
    return {title: flags.findall(body) for title, body in zip(parts[::2], parts[1::2], strict=True)}


def test_train_has_groups_and_the_ten_come_first(run_hpcdl: CommandLine) -> None:
    reported = run_hpcdl(["train", "--help"], env={"COLUMNS": "80"}).out
    found = sections(reported)
    assert list(found)[:-1] == HEADINGS, "a new group of settings needs a heading in cli/groups.py"
    assert tuple(found["Most used"]) == MOST_USED and len(MOST_USED) == 10
    listed = [flag for title in HEADINGS for flag in found[title]]
    assert len(listed) == len(set(listed)) and {item.key for item in all_settings(TrainConfig)} <= set(listed)
    assert max(map(len, reported.splitlines())) <= 80


def test_help_is_a_table_of_contents(run_hpcdl: CommandLine) -> None:
    contents = run_hpcdl(["--help"], env={"COLUMNS": "80"}).out
    assert sorted(name for names in CONTENTS.values() for name in names) == sorted(itertools.chain(*COMMANDS.values()))
    assert [heading for heading in CONTENTS if f"\n{heading}:\n" in contents] == list(CONTENTS)
    lists = [contents, *(run_hpcdl([group, "--help"], env={"COLUMNS": "80"}).out for group in GROUPS)]
    assert "..." not in "".join(lists).replace("[ARGS]...", ""), "a command's first sentence is too long for its line"


def test_short_names_mean_the_long_ones(run_hpcdl: CommandLine) -> None:
    shown = run_hpcdl(["config", "show", "-n", "3", "--lr", "0.5", "--json"]).json()["settings"]
    reported = {item["key"]: (item["value"], item["origin"]) for item in shown}
    assert reported["ranks"] == ("3", "flag") and reported["learning-rate"] == ("0.5", "flag")


@pytest.mark.parametrize("arguments", [[], ["bench"]], ids=lambda words: " ".join(words) or "hpcdl")
def test_a_command_without_anything_shows_its_help(run_hpcdl: CommandLine, arguments: Sequence[str]) -> None:
    finished = run_hpcdl(arguments)
    assert (finished.code, finished.err) == (0, "")
    assert finished.out.startswith("Usage: hpcdl")


@pytest.mark.parametrize(
    "key, incomplete, names",
    [
        ("strategy", "", [info.name for info in listed_strategies()]),
        ("strategy", "ring,async-m", ["ring,async-measgd", "ring,async-msgd"]),
        ("model", "", list(MODELS)),
        ("machine", "", machine_names()),
        ("profile", "", ["auto", "none"]),
    ],
)
def test_a_tab_offers_names(key: str, incomplete: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    complete = completer(key)
    assert complete is not None and sorted(complete(incomplete)) == sorted(names)


def test_the_shell_is_given_them(run_hpcdl: CommandLine) -> None:
    line = "hpcdl train --schedule "
    words = {"_HPCDL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "3"}
    assert sorted(run_hpcdl([], env=words).out.split()) == ["constant", "cosine", "polynomial", "step"]
