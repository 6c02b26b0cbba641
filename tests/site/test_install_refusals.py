"""`make install` refuses wrong settings in one line before it writes, and a failed install leaves nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.conftest import Finished
from tests.site.checkouts import Checkout, clean_environment, copy_checkout, files_below


class Place:
    """An empty PREFIX and MODULEDIR."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.prefix, self.moduledir = folder / "apps" / "hpcdl", folder / "apps" / "modulefiles"
        self.settings = (f"PREFIX={self.prefix}", f"MODULEDIR={self.moduledir}", f"PYTHON={sys.executable}")

    def fake_tree(self, version: str, receipt: str = "install.json") -> Path:
        """Create files that look like an installed version to the installer."""
        tree = self.prefix / version
        (tree / "venv" / "bin").mkdir(parents=True)
        (tree / receipt).write_text(json.dumps({"version": version, "pid": 2**22 + 1, "host": os.uname().nodename}))
        self.moduledir.joinpath("hpcdl").mkdir(parents=True, exist_ok=True)
        self.moduledir.joinpath("hpcdl", f"{version}.lua").write_text(f'local prefix = "{self.prefix}"\n')
        return tree


@pytest.fixture
def place(open_folder: Path) -> Place:
    return Place(Path(tempfile.mkdtemp(dir=open_folder)))


@pytest.fixture
def bad_wheels(tmp_path: Path) -> Path:
    """A wheelhouse with wheels, none of which is needed."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / "nothing-1.0-py3-none-any.whl").write_bytes(b"")
    return folder


def fake_python(folder: Path, *lines: str) -> Path:
    """Make a Python that runs `lines` in its site customisation at start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("\n".join(("import sys", *lines)) + "\n")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program


def assert_refused(finished: Finished, *words: str) -> None:
    """Assert one line of hpcdl on stderr (beside make's) with these words, and exit code 2, which make passes on."""
    own = [line for line in finished.err.splitlines() if not line.startswith("make")]
    assert len(own) == 1 and own[0].startswith("hpcdl: "), finished.err
    for word in words:
        assert word in own[0]
    assert finished.code == 2 and "Error 2" in finished.err


@pytest.mark.parametrize(
    "setting, words",
    [
        ("prefix=/opt/tools", ("prefix= is unknown; did you mean PREFIX?",)),
        ("DESTDIR=/tmp/image", ("DESTDIR= is unknown; possible: PREFIX, MODULEDIR",)),
        ("MPI=openmpi", ("MPI=openmpi", "MPI=mpich", "MPI=site")),
        ("PREFIX=/tmp/a:b", ("PREFIX", "PATH")),
        ('PREFIX=/tmp/a"b', ("PREFIX",)),
        ("MPI_MODULE=open mpi;x", ("MPI_MODULE", "module load")),
        ("MPI_MODULE=openmpi/4.1", ("MPI_MODULE=openmpi/4.1 is for MPI=site",)),
        ("MPI_LIBRARY=/opt/libmpi.so", ("MPI_LIBRARY=/opt/libmpi.so is for MPI=site",)),
        ("PREFIX=/dev/null/apps", ("/dev/null is not a folder", "PREFIX")),
        ("MODULEDIR=/dev/null", ("/dev/null is not a folder", "MODULEDIR")),
        ("WHEELHOUSE=/proc/self/fdinfo", ("holds no wheels", "make wheelhouse")),
        ("SUFFIX=/../up", ("no version", "SUFFIX")),
        ("PYTHON=python9.9", ("python9.9", "sudo apt-get install git make python3-venv")),
        ("PYTHON=/bin/false", ("no working Python", "3.11")),
    ],
)
def test_bad_settings(checkout: Checkout, place: Place, setting: str, words: tuple[str, ...]) -> None:
    assert_refused(checkout.make("install", *place.settings, setting), *words)
    assert not files_below(place.folder)


def test_old_python(checkout: Checkout, place: Place, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "old", "sys.version_info = (3, 9, 2, 'final', 0)")
    assert_refused(checkout.make("install", *place.settings, f"PYTHON={python}"), "Python 3.9", "3.11")
    assert not files_below(place.folder)


def test_python_without_venv(checkout: Checkout, place: Place, tmp_path: Path) -> None:
    python = fake_python(tmp_path / "bare", "sys.modules['ensurepip'] = None")
    finished = checkout.make("install", *place.settings, f"PYTHON={python}")
    assert_refused(finished, "virtual environments", "sudo apt-get install git make python3-venv")
    assert_refused(checkout.make("setup", f"PYTHON={python}"), "virtual environments", "python3-venv")


def test_no_mpi_library(checkout: Checkout, place: Place) -> None:
    finished = checkout.make("install", *place.settings, "MPI=site", "MPI_LIBRARY=/no/libmpi.so")
    assert_refused(finished, "MPI=site", "/no/libmpi.so", "load the site's MPI module", "MPI=mpich")
    finished = checkout.make("install", *place.settings, "MPI=site", "MPI_LIBRARY=libc.so.6")
    assert_refused(finished, "libc.so.6 is none")
    assert not files_below(place.folder)


def test_no_write_access(checkout: Checkout, place: Place) -> None:
    place.folder.chmod(0o755)
    before = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    place.folder.chmod(0o555)
    settings = (*place.settings[:2], "PYTHON=/usr/bin/python3")
    finished = checkout.make("install", *settings, before=before)
    assert_refused(finished, f"PREFIX={place.prefix}", f"{place.folder} is not writable", "choose another PREFIX")
    assert not files_below(place.folder)


def test_installed_already(checkout: Checkout, place: Place) -> None:
    tree = place.fake_tree("1.0")
    before = files_below(place.folder)
    assert_refused(checkout.make("install", *place.settings), str(tree), "already", "FORCE=1")
    assert files_below(place.folder) == before


def test_a_modulefile_of_another_prefix_is_never_replaced(checkout: Checkout, place: Place) -> None:
    place.fake_tree("1.0")
    other = f"PREFIX={place.folder / 'elsewhere'}"
    before = files_below(place.folder)
    finished = checkout.make("install", *place.settings, other, "FORCE=1")
    assert_refused(finished, str(place.moduledir / "hpcdl" / "1.0.lua"), "SUFFIX=-openmpi")
    assert files_below(place.folder) == before


def test_a_strange_folder_is_never_replaced(checkout: Checkout, place: Place) -> None:
    tree = place.fake_tree("1.0", receipt="somebody-elses")
    for target in ("install", "uninstall"):
        finished = checkout.make(target, *place.settings, "FORCE=1")
        assert finished.code == 2 and str(tree) in finished.err
    assert (tree / "somebody-elses").exists()


@pytest.mark.parametrize("target, settings", [("install", ("FORCE=1",)), ("uninstall", ())])
def test_a_tree_in_use_stays(checkout: Checkout, place: Place, target: str, settings: tuple[str, ...]) -> None:
    tree = place.fake_tree("1.0")
    program = tree / "venv" / "bin" / "busy"
    shutil.copy("/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as busy:
        try:
            assert_refused(checkout.make(target, *place.settings, *settings), str(busy.pid), "in use")
        finally:
            busy.kill()
    assert program.exists()


def test_a_failed_install_leaves_nothing(checkout: Checkout, place: Place, bad_wheels: Path) -> None:
    finished = checkout.make("install", *place.settings, f"WHEELHOUSE={bad_wheels}")
    assert finished.code == 2 and "Error 1" in finished.err
    assert "hpcdl: pip install failed (see above); nothing was left behind" in finished.err
    assert not files_below(place.folder)


@pytest.mark.long
@pytest.mark.parametrize("loaded", ["", "gcc/12.2:openmpi/4.1.4"])
def test_a_module_of_mpi_that_is_not_loaded(checkout: Checkout, place: Place, bad_wheels: Path, loaded: str) -> None:
    """`module load hpcdl` loads MPI_MODULE: a name that no module has would show only there."""
    library = next((Path(sys.prefix) / "lib").glob("libmpi.so.*"))
    settings = ("MPI=site", f"MPI_LIBRARY={library}", "MPI_MODULE=openmpi", f"WHEELHOUSE={bad_wheels}")
    finished = checkout.make("install", *place.settings, *settings, before=["env", f"LOADEDMODULES={loaded}"])
    warning = "hpcdl: warning: MPI_MODULE=openmpi is not loaded in this shell; check that `module load openmpi` works"
    assert "installing" in finished.out and (warning in finished.err) == (not loaded), finished.err


@pytest.mark.soak
def test_a_failed_replacement_keeps_the_old(checkout: Checkout, place: Place, bad_wheels: Path) -> None:
    place.fake_tree("1.0")
    before = set(files_below(place.folder))
    finished = checkout.make("install", *place.settings, f"WHEELHOUSE={bad_wheels}", "FORCE=1")
    assert finished.code == 2 and "nothing was left behind" in finished.err
    assert set(files_below(place.folder)) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_install(checkout: Checkout, place: Place, bad_wheels: Path, number: signal.Signals) -> None:
    place.fake_tree("1.0")
    before = set(files_below(place.folder))
    line = [sys.executable, "-B", "scripts/installer", "install"]
    variables = dict(word.split("=", 1) for word in place.settings) | {"WHEELHOUSE": str(bad_wheels), "FORCE": "1"}
    environment = clean_environment(place.folder) | variables
    with subprocess.Popen(
        line, cwd=checkout.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        marker = place.prefix / "1.0" / ".hpcdl-unfinished"
        while not marker.exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(number)
        _, errors = process.communicate(timeout=300)
    if number == signal.SIGTERM:
        assert process.returncode == 130 and b"SIGTERM" in errors
    else:  # no cleanup was possible: the next command does it and restores the old tree
        assert marker.exists()
        finished = checkout.make("install", *place.settings)
        assert "clearing what an unfinished install left" in finished.out
        assert_refused(finished, "already", "FORCE=1")
    assert set(files_below(place.folder)) == before


@pytest.mark.long
def test_an_install_stopped_while_it_looks_for_sphinx(open_folder: Path, place: Place, bad_wheels: Path) -> None:
    """A stop during the search for Sphinx ends the install; only a missing Sphinx leads to text pages and a warning."""
    checkout = copy_checkout(open_folder / "with pages", "1.0")
    (checkout.folder / "docs").mkdir()
    (checkout.folder / "docs" / "conf.py").touch()
    line = ["make", "--no-print-directory", "install", *place.settings, f"WHEELHOUSE={bad_wheels}"]
    with subprocess.Popen(
        line,
        cwd=checkout.folder,
        env=clean_environment(place.folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        assert process.stdout
        reported = ""
        while "fetching Sphinx" not in reported:
            reported += process.stdout.readline()
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGTERM)  # as timeout(1) does
        reported += process.stdout.read()
    assert "pip install" not in reported
    assert "stopped by SIGTERM; nothing was left behind" in reported
    assert not files_below(place.folder)


WHOLE = {"apps/hpcdl/1.0/install.json", "apps/hpcdl/1.0/installed.json", "apps/modulefiles/hpcdl/1.0.lua"}
OWN = ("hpcdl/site.toml", "hpcdl/1.0/share/hpcdl/profiles/own.toml", "modulefiles/hpcdl/.own", "modulefiles/own.lua")
"""Files that a site has beside and within an installation."""


def write_own(place: Place) -> None:
    for name in OWN:
        path = place.folder / "apps" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("own")


def without_own(place: Place, *, there: bool) -> set[str]:
    """Return all files but the site's; asserts that each of those exists exactly once, or none."""
    files = [path for path in (place.folder / "apps").rglob("*") if path.is_file() and path.read_bytes() != b"own"]
    own = [path.name for path in (place.folder / "apps").rglob("*") if path.is_file() and path.read_bytes() == b"own"]
    assert sorted(own) == (sorted(Path(name).name for name in OWN) if there else [])
    return {str(path.relative_to(place.folder)) for path in files}


@pytest.mark.long
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_install_stopped_after_any_change(
    checkout: Checkout, place: Place, old: bool, number: signal.Signals
) -> None:
    """Stopped after any rename, creation or removal, the old installation is back, or the new one is complete."""
    environment = clean_environment(place.folder) | dict(word.split("=", 1) for word in place.settings) | {"FORCE": "1"}
    line = [sys.executable, "-B", str(Path(__file__).with_name("stopped_at.py")), "install"]
    for at in range(1, 90):
        shutil.rmtree(place.folder / "apps", ignore_errors=True)
        if old:
            place.fake_tree("1.0")
            write_own(place)
        before = set(files_below(place.folder))
        stopped = subprocess.run(
            [*line, str(at), str(int(number))],
            cwd=checkout.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        case = f"{number.name} after change {at}: {stopped.stderr}"
        if number == signal.SIGKILL and stopped.returncode == -number:  # no cleanup: the next command does it
            again = [*line, "0", str(int(number))]
            subprocess.run(again, cwd=checkout.folder, env=environment, check=True, capture_output=True)
            assert without_own(place, there=old) == WHOLE, case
        elif stopped.returncode == 0:
            assert without_own(place, there=old) == WHOLE, case
        else:
            assert stopped.returncode == 130 and number == signal.SIGTERM, case
            assert set(files_below(place.folder)) == before, case
        if "no such change" in stopped.stdout:
            break
    assert 12 < at < 89


def test_steps_that_outlived_their_install_are_ended(checkout: Checkout, place: Place) -> None:
    """Steps of a killed install are ended first: its pip may still write into the tree that the next install clears."""
    tree = place.fake_tree("1.0", receipt="unused")
    with subprocess.Popen(["true"]) as gone:
        pass
    (place.moduledir / "hpcdl" / "1.0.lua").write_text("of another prefix: refused once the tree is cleared\n")
    (tree / ".hpcdl-unfinished").write_text(json.dumps({"pid": gone.pid, "host": os.uname().nodename}))
    (tree / "python").symlink_to(sys.executable)
    code = f"import time\nwhile True: open({str(tree / 'written')!r}, 'w').close(); time.sleep(0.001)"
    with subprocess.Popen([tree / "python", "-c", code], stderr=subprocess.DEVNULL) as writes:
        while not (tree / "written").exists():
            time.sleep(0.01)
        finished = checkout.make("install", *place.settings)
        assert "clearing what an unfinished install left" in finished.out
        assert writes.wait(300) == -signal.SIGKILL
    assert_refused(finished, "SUFFIX=-openmpi")
    assert not tree.exists()


def test_an_install_under_way_is_left_alone(checkout: Checkout, place: Place) -> None:
    tree = place.fake_tree("1.0", receipt="unused")
    marker = tree / ".hpcdl-unfinished"
    marker.write_text(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}))
    assert_refused(checkout.make("install", *place.settings), f"process {os.getpid()}", "FORCE=1")


def test_uninstall(checkout: Checkout, place: Place) -> None:
    first, second = place.fake_tree("0.9"), place.fake_tree("1.0")
    (place.prefix / "site.toml").write_text("[train]\n")
    finished = checkout.make("uninstall", *place.settings, "VERSION=0.9")
    assert finished.code == 0, finished.err
    assert not first.exists() and second.exists()
    assert [path.name for path in (place.moduledir / "hpcdl").iterdir()] == ["1.0.lua"]
    assert checkout.make("uninstall", *place.settings, env={"VERSION": "7"}).code == 0, (
        "the environment's VERSION counts"
    )
    assert set(files_below(place.folder)) == {"apps", "apps/hpcdl", "apps/hpcdl/site.toml", "apps/modulefiles"}
    assert_refused(checkout.make("uninstall", *place.settings), "1.0 is not in", "VERSION")
