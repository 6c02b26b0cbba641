"""make clean, setup, demo, docs, axe and release remove and overwrite only what they made themselves."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.site.checkouts import Checkout, files_below


def test_clean_removes_what_make_has_made(checkout: Checkout, tmp_path: Path) -> None:
    own = Checkout(tmp_path / "checkout")
    shutil.copytree(checkout.folder, own.folder)
    for name in ("demo", "build", "dist", "wheelhouse"):
        (own.folder / name / "its").mkdir(parents=True)
        (own.folder / name / "its" / "file").touch()
        (own.folder / name / ".hpcdl-made").write_text("its\n..\n../README.md\n")
    for name in ("demo/run", "wheelhouse/own.whl", "mine.egg-info"):
        (own.folder / name).write_text("mine")
    (own.folder / "dist" / "linked").symlink_to(tmp_path)
    finished = own.make("clean")
    assert finished.code == 0, finished.err
    assert {line.split()[1] for line in finished.out.splitlines()} == {"demo", "dist", "wheelhouse"}
    assert not (own.folder / "build").exists() and not [*own.folder.glob("*/its")]
    for name in ("demo/run", "wheelhouse/own.whl", "mine.egg-info", "README.md"):
        assert (own.folder / name).is_file()
    (own.folder / "demo" / "run").unlink()
    (own.folder / "build").symlink_to(tmp_path)
    assert "build stays" in own.make("clean").out and (own.folder / "build").is_symlink()


@pytest.mark.parametrize(
    "script, path", [("demo", "demo/run"), ("docs", "build/site"), ("axe", "build/axe"), ("release", "build/site")]
)
def test_commands_write_over_nobodys_files(checkout: Checkout, tmp_path: Path, script: str, path: str) -> None:
    shutil.copytree(checkout.folder / "scripts", tmp_path / "scripts")
    (tmp_path / path).mkdir(parents=True)
    (tmp_path / path / "mine").touch()
    before = files_below(tmp_path)
    line = [f"scripts/{script}", sys.executable]
    finished = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 2 and f"hpcdl: {path} is there, and make did not make it" in finished.stderr
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_setup_clears_only_a_virtual_environment(checkout: Checkout, tmp_path: Path, kind: str) -> None:
    shutil.copytree(checkout.folder / "scripts", tmp_path / "scripts")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine").touch()
    if kind == "link":
        (tmp_path / "own" / "pyvenv.cfg").touch()
        (tmp_path / ".venv").symlink_to("own")
    elif kind == "folder":
        (tmp_path / "own").rename(tmp_path / ".venv")
    else:
        (tmp_path / ".venv").touch()
    before = files_below(tmp_path)
    line = ["scripts/setup", sys.executable, ".", "stamp"]
    finished = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 2 and finished.stderr.startswith("hpcdl: .venv is there") and not finished.stdout
    assert files_below(tmp_path) == before
