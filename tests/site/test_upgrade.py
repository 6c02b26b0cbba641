"""`make install VERSION=...` of a newer checkout beside an older version, and the version that `module load` gives."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Finished
from tests.lab.needs import LMOD
from tests.site.checkouts import Checkout, copy_checkout, files_below
from tests.site.test_install_refusals import Place, assert_refused, fake_python, place

__all__ = ["place"]
WITHOUT_PIP = (
    "if sys.orig_argv[2:] == ['scripts/installer', 'install']:",
    "    sys.path[:0] = ['scripts/installer', '.']",
    "    import build",
    "    build.fill = lambda plan: (plan.tree / 'install.json').write_text('{\"version\": \"%s\"}' % plan.version)",
)
"""Replace the installer's slow steps; make runs the rest as usual."""


@pytest.fixture(scope="module")
def newer(open_folder: Path) -> Checkout:
    """A checkout of the next version."""
    return copy_checkout(open_folder / "newer", "1.1")


def upgrade(checkout: Checkout, place: Place, tmp_path: Path, *words: str) -> Finished:
    """Run `make install WORDS` with a Python that skips pip."""
    python = tmp_path / "fake" / "python"
    if not python.exists():
        fake_python(python.parent, *WITHOUT_PIP)
    settings = [word for word in place.settings if not word.startswith("PYTHON=")]
    return checkout.make("install", *settings, f"PYTHON={python}", *words)


def loaded(place: Place, name: str = "hpcdl") -> str:
    """Return HPCDL_VERSION after `module load NAME`."""
    script = f"source {LMOD}/init/bash; module use {place.moduledir}; module load {name}; echo $HPCDL_VERSION"
    line = ["bash", "--noprofile", "--norc", "-c", script]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(place.folder), "TERM": "dumb"}
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.lab("lmod")
def test_a_newer_version_beside_the_one_before(
    checkout: Checkout, newer: Checkout, place: Place, tmp_path: Path
) -> None:
    first = upgrade(checkout, place, tmp_path, "VERSION=1.0")
    assert first.code == 0 and "stay as they are" not in first.out, first.err
    (place.prefix / "site.toml").write_text("[train]\n")
    before = files_below(place.prefix)
    second = upgrade(newer, place, tmp_path, "VERSION=1.1")
    assert second.code == 0 and "hpcdl: these versions stay as they are: 1.0\n" in second.out, second.err
    assert "hpcdl: installed in " in second.out and "; 0 MB were fetched" in second.out
    assert files_below(place.prefix).items() >= before.items(), "nothing of the version before has changed"
    receipts = {path.parent.name: json.loads(path.read_text()) for path in place.prefix.glob("*/install.json")}
    assert receipts == {"1.0": {"version": "1.0"}, "1.1": {"version": "1.1"}}
    assert (loaded(place), loaded(place, "hpcdl/1.0")) == ("1.1", "1.0")

    default = place.moduledir / "hpcdl" / "default"
    default.symlink_to("1.0.lua")
    assert loaded(place) == "1.0", "rolled back"
    again = upgrade(newer, place, tmp_path, "VERSION=1.1", "FORCE=1")
    assert again.code == 0 and f"`ln -sfn 1.1.lua {default}` has it load 1.1" in again.out, again.out + again.err
    default.unlink()
    default.symlink_to("1.1.lua")
    assert "points at" not in upgrade(newer, place, tmp_path, "FORCE=1").out and loaded(place) == "1.1"


@pytest.mark.parametrize("words", [("VERSION=0.9",), ("VERSION=0.9-openmpi", "SUFFIX=-openmpi")])
def test_a_version_that_the_checkout_has_not(checkout: Checkout, place: Place, words: tuple[str, ...]) -> None:
    finished = checkout.make("install", *place.settings, *words)
    assert_refused(finished, words[0], "this checkout is version 1.0", "git switch --detach v0.9`", "leave VERSION out")
    assert not files_below(place.folder)


def test_a_version_with_its_suffix(checkout: Checkout, place: Place, tmp_path: Path) -> None:
    for version in ("1.0", "1.0-openmpi"):
        finished = upgrade(checkout, place, tmp_path, f"VERSION={version}", "SUFFIX=-openmpi", "FORCE=1")
        assert finished.code == 0 and (place.prefix / "1.0-openmpi" / "install.json").is_file(), finished.err
