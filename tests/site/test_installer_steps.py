"""Single steps of the installer: pages, programs on PATH, messages, and the link `default`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.site.checkouts import Checkout, clean_environment, copy_checkout
from tests.site.test_install_refusals import Place, place
from tests.site.test_what_the_site_has import install

__all__ = ["place"]


def step(checkout: Checkout, code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `code` in a checkout with the installer's `build`, `plan` and `words` at hand."""
    start = "import sys; sys.path[:0] = ['scripts/installer', '.']; import build, plan; words = sys.argv[1:]\n"
    line = [sys.executable, "-B", "-c", start + code, *map(str, words)]
    environment = clean_environment(checkout.folder) | {"WHEELHOUSE": str(checkout.folder)}
    return subprocess.run(line, cwd=checkout.folder, env=environment, capture_output=True, text=True, check=True)


def test_python_and_the_own_mpiexec_are_on_path(checkout: Checkout, tmp_path: Path) -> None:
    code = "build.write_programs(build.Path(words[0]), own_mpi=words[1] == 'yes')"
    for own_mpi, names in (
        ("yes", {"hpcdl", "hpcdl-python", "python", "mpiexec"}),
        ("no", {"hpcdl", "hpcdl-python", "python"}),
    ):
        tree = tmp_path / own_mpi
        (tree / "venv" / "bin").mkdir(parents=True)
        for name in ("python", "mpiexec"):
            (tree / "venv" / "bin" / name).write_text(f'#!/bin/sh\necho {name} of the tree "$@"\n')
            (tree / "venv" / "bin" / name).chmod(0o755)
        step(checkout, code, tree, own_mpi)
        assert {path.name for path in (tree / "bin").iterdir()} == names
        for name in names - {"hpcdl", "hpcdl-python"}:
            reported = subprocess.run([tree / "bin" / name, "-n", "a b"], capture_output=True, text=True, check=True)
            assert reported.stdout == f"{name} of the tree -n a b\n"


@pytest.mark.long
def test_a_site_of_another_time_is_never_copied(tmp_path: Path) -> None:
    """An old site is never copied: without Sphinx, as from an empty wheelhouse, the pages are text, with a message."""
    checkout = copy_checkout(tmp_path / "checkout", "1.0")
    shutil.copytree(ROOT / "docs", checkout.folder / "docs", ignore=shutil.ignore_patterns("study", "report"))
    stale = checkout.folder / "build" / "site" / "index.html"
    stale.parent.mkdir(parents=True)
    stale.write_text("of version 0.9")
    code = """
settings = plan.Plan.from_environment({**build.os.environ, 'PREFIX': words[0], 'MODULEDIR': words[0]})
scratch = build.Path(words[0]) / 'scratch'
pages = settings.tree / 'share' / 'hpcdl' / 'docs'
build.copy_pages(pages)
scratch.mkdir()
build.build_pages(settings, scratch, build.pip_environment(settings, scratch))
"""
    done = step(checkout, code, tmp_path / "apps")
    pages = tmp_path / "apps" / "1.0" / "share" / "hpcdl" / "docs"
    assert (pages / "index.md").is_file() and not (pages / "html").exists()
    assert "the pages are installed as text; `make wheelhouse` adds it" in done.stderr
    assert "hpcdl: fetching Sphinx for the pages ..." in done.stdout.splitlines()


def test_a_step_says_that_it_continues(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    code = "build.NEWS_S = 0.2; build.run(['sleep', '0.5'], 'sleeping', growing=build.Path(words[0]))"
    first, *news = step(checkout, code, tmp_path).stdout.splitlines()
    assert first == "hpcdl: sleeping ..." and news and all(line.endswith("0 s, 3 MB so far") for line in news), news


def test_what_pip_fetched_is_counted_by_its_own_log(checkout: Checkout, tmp_path: Path) -> None:
    log = tmp_path / "pip.log"
    log.write_text(
        "2026-11-26T15:00:00,1 Collecting numpy\n2026-11-26T15:00:00,2   Downloading numpy-2.whl (16.5 MB)\n"
        "2026-11-26T15:00:00,3   Using cached six-1.whl (11 kB)\n2026-11-26T15:00:00,4 Processing ./h5py-3.whl\n"
        "2026-11-26T15:00:00,5   Downloading absl.whl.metadata (500 bytes)\n"
    )
    code = "print(build.fetched_bytes(build.Path(words[0])), build.fetched_bytes(build.Path(words[0] + '.gone')))"
    assert step(checkout, code, log).stdout == "16500500 0\n"


def test_a_default_that_names_no_version_is_reported(checkout: Checkout, place: Place) -> None:
    folder = place.moduledir / "hpcdl"
    folder.mkdir(parents=True)
    (folder / "default").symlink_to("0.9.lua")
    finished = checkout.make("uninstall", *place.settings)
    assert finished.code == 2 and "default" not in finished.err
    place.fake_tree("1.0")
    finished = checkout.make("uninstall", *place.settings)
    assert finished.code == 0 and f"{folder}/default points at 0.9.lua, which is not there; `rm" in finished.err
    (folder / "0.8.lua").write_text("of another version")
    place.fake_tree("1.0")
    finished = checkout.make("uninstall", *place.settings)
    assert f"`ln -sfn 0.8.lua {folder}/default` points it at one that is" in finished.err
    (folder / "0.8.lua").rename(folder / "0.9.lua")
    assert "hpcdl: installed in" in install(checkout, place)
    finished = checkout.make("uninstall", *place.settings)
    assert finished.code == 0 and "default" not in finished.err


def test_a_full_disk_is_reported_in_one_line(tmp_path: Path) -> None:
    """Of a folder that is copied, and of a step, whose own words would be a traceback for each line of its log."""
    checkout = copy_checkout(tmp_path / "checkout", "1.0")
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "page.md").write_text("x")
    code = """
import shutil, tree, types
def copy(path, target):
    shutil.copyfile(path, '/dev/full')
def install():
    shutil.copytree(words[0], words[1], copy_function=copy)
settings = plan.Plan.from_environment({**build.os.environ, 'PREFIX': words[2], 'MODULEDIR': words[2]})
try:
    with tree.replacing(settings):
        install()
except plan.InstallError as error:
    print(error)
scratch = build.Path(words[1])
(plan.CHECKOUT / 'docs').mkdir()
(plan.CHECKOUT / 'docs' / 'conf.py').touch()
run, full = build.run, ['/bin/sh', '-c', 'echo "No space left on device"; exit 1']
build.run = lambda line, what, *_: run(full, what) if 'Sphinx' in what else None
try:
    build.build_pages(settings, scratch, build.pip_environment(settings, scratch))
except plan.InstallError as error:
    print(error)
"""
    done = step(checkout, code, tmp_path / "source", tmp_path / "target", tmp_path / "apps")
    why = "No space left on device; make room (`df -h`, `df -i`), or choose another place; nothing was left behind"
    first, _, last = done.stdout.splitlines()
    assert first == f"cannot write {tmp_path}/target/page.md: {why}" and not (tmp_path / "apps").exists()
    assert (last, done.stderr) == (f"fetching Sphinx for the pages failed: {why}", "")
