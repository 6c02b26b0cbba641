"""Man pages and completions are complete, valid roff, and generated from the current command line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from hpcdl.cli.app import app_for
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, ROOT / "scripts" / "make_manual.py", folder], check=True, timeout=300)
    return folder


def test_every_command_has_a_page(share: Path) -> None:
    names = {path.stem for path in (share / "man" / "man1").iterdir()}
    commands = typer.main.get_command(app_for()).commands  # type: ignore[attr-defined]
    assert {"hpcdl", "hpcdl-config-show", *(f"hpcdl-{name}" for name in commands)} <= names


def test_pages_say_what_help_says(share: Path) -> None:
    page = (share / "man" / "man1" / "hpcdl-train.1").read_text().replace("\\-", "-")
    for flag in ("--model", "--strategy", "--ranks", "--resume", "--json"):
        assert re.search(rf"^\.B .*{flag}\b", page, re.MULTILINE), flag
    assert ".SH EXAMPLE" in page and "hpcdl train --model" in page
    assert ".SH EXIT STATUS" in (share / "man" / "man1" / "hpcdl.1").read_text()


@pytest.mark.lab("groff")
def test_roff_is_clean(share: Path) -> None:
    for path in (share / "man" / "man1").iterdir():
        shown = subprocess.run(["groff", "-man", "-Tutf8", "-ww", path], capture_output=True, text=True, check=True)
        assert shown.stderr == "", path.name
        assert shown.stdout.startswith(f"\x1b[4m{path.stem.upper()}\x1b[24m(1)") or path.stem.upper() in shown.stdout


@pytest.mark.parametrize("name", ["hpcdl.bash", "_hpcdl", "hpcdl.fish"])
def test_completions(share: Path, name: str) -> None:
    assert "_HPCDL_COMPLETE" in (share / "completions" / name).read_text() or name == "hpcdl.fish"
    assert "hpcdl" in (share / "completions" / name).read_text()


def test_bash_accepts_its_completion(share: Path) -> None:
    script = f"source {share}/completions/hpcdl.bash && complete -p hpcdl"
    shown = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.rstrip().endswith("-F _hpcdl_completion hpcdl")
