"""The modulefile under a real Lmod: load, unload without traces, swaps, trees and prerequisites."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, Finished
from tests.lab.needs import LMOD

pytestmark = pytest.mark.lab("lmod")
GOLDEN = Path(__file__).parent / "golden" / "load.bash"
TEMPLATE = ROOT / "etc" / "modulefiles" / "hpcdl" / "hpcdl.lua"
LMOD_OWN = re.compile(r"^(_ModuleTable|__LMOD_REF_COUNT_|_LMFILES_$|LOADEDMODULES$|_$|SHLVL$|PWD$)")
"""Variables of Lmod, and those in which any two commands differ."""
SHOW = "printf '%s\\n' ---; env -0 | tr '\\n\\0' ' \\n' | sort; declare -F; complete -p"


@dataclass(frozen=True)
class Modules:
    """A modulefile tree with an imaginary prefix: loading does not need the prefix's files."""

    tree: Path

    def add(self, version: str, mpi_module: str = "", mpi_library: str = "", tree: Path | None = None) -> None:
        """Write a modulefile as `make install` does."""
        text = TEMPLATE.read_text()
        values = {
            "VERSION": version,
            "PREFIX": "/apps/hpcdl",
            "MPI": "mpich",
            "MPI_MODULE": mpi_module,
            "MPI_LIBRARY": mpi_library,
        }
        for name, value in values.items():
            text = text.replace(f"@{name}@", value)
        assert not re.search(r"@\w+@", text)
        self.write(f"hpcdl/{version}", text, tree)

    def write(self, name: str, text: str, tree: Path | None = None) -> None:
        """Write any other modulefile."""
        path = (tree or self.tree) / f"{name}.lua"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def shell(self, *commands: str, env: dict[str, str] | None = None) -> Finished:
        """Run `commands` in a fresh bash with this tree in use."""
        script = "\n".join((f"source {LMOD}/init/bash", f"module use {self.tree}", *commands))
        environment = {
            "HOME": str(self.tree),
            "PATH": "/usr/bin:/bin",
            "TERM": "dumb",
            "LMOD_PAGER": "none",
            "LANG": "C.UTF-8",
        }
        line = ["bash", "--noprofile", "--norc", "-c", script]
        finished = subprocess.run(line, env=environment | (env or {}), capture_output=True, text=True, timeout=300)
        return Finished(finished.returncode, finished.stdout, finished.stderr)

    def states(self, *commands: str, env: dict[str, str] | None = None) -> list[dict[str, str]]:
        """Return environment, functions and completions at each SHOW in `commands`, without Lmod's variables."""
        finished = self.shell(*commands, env=env)
        assert finished.err == "", finished.err
        return [state_of(part) for part in finished.out.split("---\n")[1:]]


def state_of(text: str) -> dict[str, str]:
    state = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        name, value = (name, value) if equals and not line.startswith(("declare", "complete")) else (line, "")
        if not LMOD_OWN.match(name):
            state[name] = value
    return state


@pytest.fixture
def modules(tmp_path: Path) -> Modules:
    tree = tmp_path / "modulefiles"
    tree.mkdir()
    made = Modules(tree)
    made.add("1.0")
    return made


def test_lua_and_lmod_find_no_fault(modules: Modules) -> None:
    for path in (TEMPLATE, modules.tree / "hpcdl" / "1.0.lua"):
        checked = subprocess.run(["luac5.3", "-p", path], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")
    program = LMOD / "libexec" / "check_module_tree_syntax"
    checked = subprocess.run([program, modules.tree], capture_output=True, text=True, check=False)
    assert checked.returncode == 0 and "No errors found" in checked.stdout + checked.stderr


def test_load_does_what_the_golden_file_says(modules: Modules) -> None:
    line = [LMOD / "libexec" / "lmod", "bash", "load", "hpcdl/1.0"]
    environment = {"MODULEPATH": str(modules.tree), "PATH": "/usr/bin:/bin", "HOME": "/home/user", "LANG": "C.UTF-8"}
    shown = subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout
    kept = [part for part in shown.splitlines() if not re.match(r"(export )?_ModuleTable", part)]
    text = "\n".join(kept).replace(str(modules.tree), "/apps/modulefiles") + "\n"
    if os.environ.get("REMAKE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


@pytest.mark.parametrize("manpath", ["", "/home/user/man", "/home/user/man:", ":/home/user/man", "/a::/b"])
def test_unload_restores_everything(modules: Modules, manpath: str) -> None:
    env = {"MANPATH": manpath, "OMP_NUM_THREADS": "7"} if manpath else {"OMP_NUM_THREADS": "7"}
    before, loaded, after = modules.states(SHOW, "module load hpcdl", SHOW, "module unload hpcdl", SHOW, env=env)
    assert after == before
    assert loaded["OMP_NUM_THREADS"] == "7"
    changed = {name for name in before.keys() | loaded.keys() if before.get(name) != loaded.get(name)}
    functions = {"declare -f _hpcdl_completion", "complete -o default -F _hpcdl_completion hpcdl"}
    variables = {"HPCDL_DOCS", "HPCDL_ROOT", "HPCDL_SHARE", "HPCDL_SITE_CONFIG", "HPCDL_VERSION"}
    manual = {"MANPATH"} if manpath == "/home/user/man" else set()
    assert changed == functions | variables | manual | {"PATH", "LMOD_FAMILY_HPCDL", "LMOD_FAMILY_HPCDL_VERSION"}


@pytest.mark.parametrize("manpath", ["", "/somebody/else:", "/usr/share/man"])
def test_man_finds_our_pages_and_the_systems(modules: Modules, manpath: str) -> None:
    root = modules.tree.parent / "apps"
    (root / "1.0" / "bin").mkdir(parents=True)
    (root / "1.0" / "share" / "man" / "man1").mkdir(parents=True)
    (root / "1.0" / "share" / "man" / "man1" / "hpcdl.1").write_text(".TH HPCDL 1\n")
    (modules.tree / "hpcdl" / "1.0.lua").write_text(
        (modules.tree / "hpcdl" / "1.0.lua").read_text().replace("/apps/hpcdl", str(root))
    )
    finished = modules.shell("module load hpcdl", "manpath 2>/dev/null", env={"MANPATH": manpath} if manpath else None)
    folders = finished.out.strip().split(":")
    assert str(root / "1.0" / "share" / "man") in folders and "/usr/share/man" in folders


def test_two_versions_swap(modules: Modules) -> None:
    modules.add("2.0")
    commands = [
        "module load hpcdl/1.0",
        SHOW,
        "module -q swap hpcdl hpcdl/2.0",
        SHOW,
        "module -q load hpcdl/1.0",
        SHOW,
        "module purge",
    ]
    first, second, again, nothing, before = modules.states(*commands, SHOW, "unset -f module", SHOW)
    assert first["PATH"].startswith("/apps/hpcdl/1.0/bin:") and second["PATH"].startswith("/apps/hpcdl/2.0/bin:")
    assert "1.0" not in second["PATH"] + second["HPCDL_SHARE"]
    assert again == first
    assert not [name for name in nothing if name.startswith("HPCDL")] and before["PATH"] == "/usr/bin:/bin"


def test_another_family_member_is_refused(modules: Modules) -> None:
    modules.write("hpcdl-testing/1.0", 'family("hpcdl")\n')
    finished = modules.shell("module load hpcdl", "module load hpcdl-testing", "module -t list")
    assert "hpcdl/1.0" not in finished.err.split("hpcdl-testing/1.0")[-1]
    assert "hpcdl-testing/1.0" in finished.err


def test_prerequisites_come_along_and_go_again(modules: Modules) -> None:
    modules.write("openmpi/4.1", 'setenv("SITE_MPI", "4.1")\n')
    modules.add("3.0", mpi_module="openmpi/4.1", mpi_library="/apps/openmpi/lib/libmpi.so")
    before, loaded, after = modules.states(SHOW, "module load hpcdl/3.0", SHOW, "module unload hpcdl", SHOW)
    assert (loaded["SITE_MPI"], loaded["MPI4PY_LIBMPI"]) == ("4.1", "/apps/openmpi/lib/libmpi.so")
    assert after == before
    kept = modules.states("module load openmpi", "module load hpcdl/3.0", "module unload hpcdl", SHOW)
    assert kept[0]["SITE_MPI"] == "4.1", "what the user loaded stays"


def test_a_missing_prerequisite_is_named(modules: Modules) -> None:
    modules.add("3.0", mpi_module="openmpi/9.9")
    finished = modules.shell("module load hpcdl/3.0")
    assert finished.code != 0 and "openmpi/9.9" in finished.err


def test_in_a_hierarchical_tree(modules: Modules) -> None:
    """With one hpcdl below each MPI, swapping the MPI reloads the hpcdl that belongs to it."""
    for mpi in ("openmpi", "mpich"):
        branch = modules.tree.parent / "MPI" / mpi
        modules.write(f"{mpi}/1", f'family("mpi")\nprepend_path("MODULEPATH", "{branch}")\n')
        modules.add(f"1.0.{mpi}", tree=branch)
    (modules.tree / "hpcdl" / "1.0.lua").unlink()
    commands = ["module load openmpi hpcdl", SHOW, "module -q unload openmpi", SHOW, "module -q load openmpi", SHOW]
    first, without, again = modules.states(*commands)
    assert first["HPCDL_VERSION"] == again["HPCDL_VERSION"] == "1.0.openmpi" and again["PATH"] == first["PATH"]
    assert "HPCDL_VERSION" not in without and "declare -f _hpcdl_completion" not in without


def test_help_whatis_and_list(modules: Modules) -> None:
    finished = modules.shell(
        "module help hpcdl", "module whatis hpcdl", "module load hpcdl", "module -t list", "module -t avail"
    )
    for text in ("hpcdl train --strategy ring", "Keywords: deep learning", "Version: 1.0", "hpcdl/1.0\n"):
        assert text in finished.out + finished.err
