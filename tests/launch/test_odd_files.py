"""A run in a folder with an odd name: the advised commands work as printed, and damage is reported in one line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdl.checkpoint.folders import own_digest
from tests.conftest import CommandLine

NAME = "a b;$(touch gone)"
DATA = "synthetic:mnist@200"


@pytest.fixture(scope="module")
def odd(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A finished run with checkpoints, and its output. Read only."""
    folder = tmp_path_factory.mktemp("odd")
    arguments = ["train", "--model", "lenet", "--data", DATA, "--steps", "20", "--batch-size", "8", "--profile", "none"]
    finished = session_hpcdl([*arguments, "--run-dir", NAME, "--checkpoint-every", "0.2s"], cwd=folder)
    assert finished.code == 0, finished.err
    return folder / NAME, finished.err


@pytest.fixture
def run_dir(odd: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(odd[0], tmp_path / "run")


def advised(text: str) -> str:
    """Return the last command that is advised."""
    return re.split(r"next: |, or |; (?=hpcdl )", text.strip().splitlines()[-1])[-1]


@pytest.mark.long
def test_what_is_advised_can_be_typed(
    odd: tuple[Path, str], session_hpcdl: CommandLine, ask_hpcdl: CommandLine
) -> None:
    """Advised commands work in bash, for a folder whose name contains a blank, a semicolon and a command."""
    run, reported = odd
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def follow(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=run.parent, capture_output=True,
            text=True, env=session_hpcdl.environment | {"PATH": path}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (line, done.stderr)
        return done.stderr

    follow(advised(reported))
    lines = [advised(ask_hpcdl(["checkpoints", NAME], cwd=run.parent).err)]
    lines.append(advised(follow(lines[0])))
    assert [line.split()[1] for line in lines] == ["evaluate", "export"]
    assert advised(follow(lines[1])).startswith("in Python, keras.saving.load_model(")
    assert not (run.parent / "gone").exists() and (run / "report" / "report.html").is_file()


def with_facts(run_dir: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change every checkpoint's facts, and update the digest."""
    for path in run_dir.glob("checkpoints/step-*/checkpoint.json"):
        document = json.loads(path.read_text())
        document["facts"] = change(document["facts"])
        path.write_text(json.dumps({**document, "digest": own_digest(document)}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": None}, "no ranks"),
        ({"seconds": None}, "no seconds"),
        ({"history": None}, "no history"),
        ({"global_batch": "8"}, "global_batch is '8'"),
        ({"shift": []}, "shift is []"),
        ({"buckets": 3}, "buckets is 3, expected object"),
    ],
)
def test_facts_that_are_missing_or_wrong_are_damage(
    ask_hpcdl: CommandLine, run_dir: Path, change: dict[str, Any], words: str
) -> None:
    with_facts(run_dir, lambda facts: {k: v for k, v in {**facts, **change}.items() if v is not None or k == "buckets"})
    found = ask_hpcdl(["checkpoints", run_dir])
    assert found.code == 3 and words in found.err and len(found.err.splitlines()) == 1, found.err


@pytest.mark.parametrize(
    ("pattern", "instead", "reported"),
    [
        (r"^model = .*", "model = lenet", "at line 1, column 9"),
        (r"^steps = .*", 'steps = "many"', "line 47: steps: 'many' is not a whole number"),
        (r"^steps = .*", "stepz = 20", "line 47: unknown key 'stepz'; did you mean 'steps'?"),
        (r"^model = .*", "", "model is missing"),
    ],
)
def test_an_edit_of_the_settings_is_named_with_its_line(
    ask_hpcdl: CommandLine, run_dir: Path, pattern: str, instead: str, reported: str
) -> None:
    settings = run_dir / "run.toml"
    settings.write_text(re.sub(pattern, instead, settings.read_text(), count=1, flags=re.MULTILINE))
    found = ask_hpcdl(["train", "--resume", "--run-dir", run_dir])
    assert found.code == 3 and reported in found.err and len(found.err.splitlines()) == 1, found.err
    assert found.err.endswith(
        '; put back what was there (record.json has it under "config"), and give other settings as flags\n'
    )


def test_settings_without_their_origins_are_resumed(ask_hpcdl: CommandLine, run_dir: Path) -> None:
    settings = run_dir / "run.toml"
    settings.write_text(settings.read_text().partition("[origins]")[0])
    found = ask_hpcdl(["train", "--resume", "--run-dir", run_dir])
    assert found.code == 0, found.err


@pytest.mark.long
def test_nothing_continues_from_a_checkpoint_without_facts(session_hpcdl: CommandLine, run_dir: Path) -> None:
    with_facts(run_dir, lambda facts: {})
    finished = session_hpcdl(["train", "--resume", "--run-dir", run_dir, "--steps", "30"])
    assert finished.code == 3 and "Traceback" not in finished.err, finished.err
    assert "is damaged" in finished.err and "its facts have no ranks" in finished.err.splitlines()[-1]


def test_text_in_place_of_numbers_is_one_line(ask_hpcdl: CommandLine, run_dir: Path, tmp_path: Path) -> None:
    """Text in place of a number, in a journal, a record or its settings, gives one line in every command."""
    before = (run_dir / "record.json").read_text()
    journal = run_dir / "metrics.jsonl"
    events = journal.read_text()
    journal.write_text(re.sub(r'"step": \d+', '"step": "many"', events))
    reported = ask_hpcdl(["watch", run_dir, "--once"])
    assert reported.code == 3 and "metrics.jsonl, line " in reported.err and "step is 'many'" in reported.err
    assert len(reported.err.splitlines()) == 1
    journal.write_text(events)
    for key in ("steps", "images_per_second", "accuracy"):
        (run_dir / "record.json").write_text(json.dumps({**json.loads(before), key: "many"}))
        for words in (
            ["report", run_dir, "--out", tmp_path / "out"], ["diff", run_dir, run_dir], ["predict", run_dir],
            ["watch", run_dir, "--once"], ["runs", run_dir],
        ):  # fmt: skip
            reported = ask_hpcdl(words)
            assert f"{key} is 'many'" in reported.err and "Traceback" not in reported.err, (words, reported)
            assert reported.code == (0 if words[0] == "runs" else 3), (words, reported)
    document = json.loads(before)
    document["config"]["bucket-size"] = "many"
    (run_dir / "record.json").write_text(json.dumps(document))
    reported = ask_hpcdl(["predict", run_dir, "--nodes", "2"])
    assert reported.code == 3 and "bucket-size is 'many'" in reported.err
