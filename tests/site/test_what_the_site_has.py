"""Install and uninstall never lose files that staff added to, beside or in place of an installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.site.checkouts import Checkout, clean_environment, files_below
from tests.site.test_install_refusals import Place, assert_refused, place

__all__ = ["place"]
PROFILE = Path("share/hpcdl/profiles/own.toml")


def install(checkout: Checkout, place: Place) -> str:
    """Run `make install FORCE=1` without pip."""
    environment = clean_environment(place.folder) | dict(word.split("=", 1) for word in place.settings) | {"FORCE": "1"}
    line = [sys.executable, "-B", str(Path(__file__).with_name("stopped_at.py")), "install", "0", "15"]
    finished = subprocess.run(line, cwd=checkout.folder, env=environment, capture_output=True, text=True, check=True)
    return finished.stdout


def add_to(tree: Path) -> dict[str, str]:
    """Add what a site may add: files anywhere, and links, whose targets must not change."""
    added = {str(PROFILE): "mine", "venv/lib/python3/site-packages/added/module.py": "mine", "notes": "mine"}
    for name, text in added.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tree / "venv" / "lib" / "__pycache__").mkdir()
    (tree / "venv" / "lib" / "__pycache__" / "module.pyc").write_text("made by Python")
    (tree.parent / "elsewhere").mkdir(exist_ok=True)
    (tree.parent / "elsewhere" / "data").write_text("mine")
    (tree / "share" / "linked").symlink_to(tree.parent / "elsewhere")
    return {**added, "share/linked/data": "mine"}


def assert_kept(kept: Path, added: dict[str, str]) -> None:
    assert {name: (kept / name).read_text() for name in added} == added
    assert not [*kept.rglob("*.pyc")]


def test_what_was_added_to_a_tree_is_kept(checkout: Checkout, place: Place) -> None:
    install(checkout, place)
    tree, modulefile = place.prefix / "1.0", place.moduledir / "hpcdl" / "1.0.lua"
    added = add_to(tree)
    reported = install(checkout, place)
    assert f"{place.prefix}/1.0.kept keeps" in reported and "and 1 more" in reported
    assert_kept(place.prefix / "1.0.kept", added)
    assert not (tree / PROFILE).exists()
    modulefile.write_text(modulefile.read_text() + "-- mine\n")
    added = add_to(tree)
    finished = checkout.make("uninstall", *place.settings)
    assert finished.code == 0 and f"{place.prefix}/1.0.kept.1 keeps" in finished.out, finished.err
    assert_kept(place.prefix / "1.0.kept.1", added)
    assert (place.prefix / "1.0.kept.1" / "1.0.lua").read_text().endswith("-- mine\n")
    assert not tree.exists() and not modulefile.exists()


def test_a_tree_of_an_earlier_version_has_no_list(checkout: Checkout, place: Place) -> None:
    tree = place.fake_tree("1.0")
    for name in ("share/hpcdl/machines", "share/man/man1", "bin"):
        (tree / name).mkdir(parents=True)
    shipped = next((checkout.folder / "share" / "hpcdl").rglob("*.toml")).relative_to(checkout.folder)
    (tree / shipped).parent.mkdir(parents=True, exist_ok=True)
    for name in (str(shipped), "share/man/man1/hpcdl-train.1", "bin/hpcdl-python"):
        (tree / name).write_text("installed")
    added = {name: text for name, text in add_to(tree).items() if not name.startswith("venv")}
    install(checkout, place)
    kept = place.prefix / "1.0.kept"
    assert_kept(kept, added)
    assert "installed" not in [path.read_text() for path in kept.rglob("*") if path.is_file()]


HIDDEN = (
    "hpcdl/.1.0.replaced",
    "hpcdl/.1.0.begun",
    "modulefiles/hpcdl/.1.0.lua.replaced",
    "modulefiles/hpcdl/.1.0.lua.new",
)
"""Hidden paths, in the order of the checks."""


@pytest.mark.parametrize("linked", [False, True])
def test_hidden_names_that_are_somebody_elses(checkout: Checkout, place: Place, linked: bool) -> None:
    place.fake_tree("1.0")
    target = place.folder / "elsewhere"
    target.mkdir()
    (target / "install.json").write_text(f'of the site: "{place.prefix}"')
    paths = [place.folder / "apps" / name for name in HIDDEN]
    for path in reversed(paths):  # each is reported while the earlier ones are free
        if linked:
            path.symlink_to(target / "install.json" if "modulefiles" in str(path) else target)
        elif path.name.endswith(".new"):
            path.write_text("mine")
        else:
            path.mkdir()
            (path / "mine").write_text("mine")
        before = files_below(place.folder)
        assert_refused(checkout.make("install", *place.settings, "FORCE=1"), str(path), "move it elsewhere")
        assert files_below(place.folder) == before
    before = {name: time for name, time in files_below(place.folder).items() if "elsewhere" in name or "/.1.0" in name}
    assert checkout.make("uninstall", *place.settings).code == 0
    assert files_below(place.folder).items() >= before.items()


@pytest.mark.parametrize("name", ["hpcdl/1.0", "modulefiles/hpcdl/1.0.lua"])
@pytest.mark.parametrize("dangling", [False, True])
def test_links_are_not_followed(checkout: Checkout, place: Place, name: str, dangling: bool) -> None:
    place.fake_tree("1.0")
    path = place.folder / "apps" / name
    path.rename(place.folder / "elsewhere")
    path.symlink_to(place.folder / ("nowhere" if dangling else "elsewhere"))
    before = files_below(place.folder)
    for target in ("install", "uninstall"):
        assert_refused(checkout.make(target, *place.settings, "FORCE=1"), str(path), "is a link, which is not followed")
        assert files_below(place.folder) == before


def test_a_folder_in_the_place_of_a_killed_install_does_not_cost_the_old_tree(checkout: Checkout, place: Place) -> None:
    place.fake_tree("1.0").rename(place.prefix / ".1.0.replaced")
    (place.prefix / "1.0").mkdir()
    before = files_below(place.folder)
    assert_refused(checkout.make("install", *place.settings, "FORCE=1"), "no hpcdl tree")
    assert files_below(place.folder) == before
