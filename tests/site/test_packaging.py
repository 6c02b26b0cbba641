"""What others use: a wheel that works alone, correct stubs, and recipes that agree with pyproject.toml."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hpcdl
from hpcdl import __version__
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGING = ROOT / "packaging"
RECIPE = PACKAGING / "spack" / "packages" / "py-hpcdl" / "package.py"
(EASYCONFIG,) = PACKAGING.glob("easybuild/*.eb")
FOR_DEVELOPERS = {"dev", "docs", "release", "all"}


def requirement(text: str) -> tuple[str, str]:
    """Return name and version range."""
    match = re.fullmatch(r"([\w-]+)(?:\[[\w,]+\])?(.*)", text)
    assert match, text
    return match[1], match[2]


@pytest.mark.parametrize("text", PROJECT["dependencies"])
def test_every_dependency_has_both_bounds_and_is_in_the_recipes(text: str) -> None:
    name, versions = requirement(text)
    lowest, below = re.fullmatch(r">=([\d.]+),<([\d.]+)", versions).groups()  # type: ignore[union-attr]
    found = re.search(rf'"py-{name}@([\d.]+):([\d.]+)?"', RECIPE.read_text())
    assert found and found[1] == lowest, f"spack's recipe says otherwise of {name}"
    assert found[2] is None or _below(found[2], below)


def _below(version: str, bound: str) -> bool:
    return [int(part) for part in version.split(".")] < [int(part) for part in bound.split(".")]


def test_all_is_every_extra_that_users_want() -> None:
    named = re.search(r"\[(.*)\]", PROJECT["optional-dependencies"]["all"][0])
    assert named and set(named[1].split(",")) == set(PROJECT["optional-dependencies"]) - FOR_DEVELOPERS - {"otf2"}


def test_the_stub_has_the_public_names_and_where_they_are() -> None:
    named: dict[str, str] = {}
    for node in ast.parse((ROOT / "hpcdl" / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module != "hpcdl":
            named |= {alias.name: str(node.module) for alias in node.names}
    modules = {name: f"hpcdl.scripts.{module}" for name, module in hpcdl._PUBLIC.items()}
    assert named == modules, "hpcdl/__init__.pyi: one import for each public name"
    assert set(hpcdl.__all__) == {*named, "data", "__version__"}


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
JOBS = {
    "unit": {"setup", "check", "unit"},
    "mpi": {"setup", "test"},
    "lab": {"check", "demo", "docs", "packaging", "test"},
    "docs": {"docs", "packaging"},
    "release": {"release"},
}
"""The make targets of each job of the workflows; the job of the lab uses .ci/run."""


def made(text: str) -> set[str]:
    """Return the make targets that commands call."""
    return set(re.findall(r"(?:^|[;&|] *|run: |without-lab |empty-root )make ([a-z]+)", text, re.MULTILINE))


def jobs() -> dict[str, str]:
    """Return every job of every workflow, with its lines."""
    found: dict[str, str] = {}
    for path in WORKFLOWS:
        _, *parts = re.split(r"^  ([a-z]+):\n", path.read_text().partition("\njobs:\n")[2], flags=re.MULTILINE)
        found |= dict(zip(parts[::2], parts[1::2], strict=True))
    return found


@pytest.mark.parametrize("job", JOBS)
def test_a_job_of_the_workflows_makes_what_a_person_makes(job: str) -> None:
    text = jobs()[job]
    commands = text + ((ROOT / ".ci" / "run").read_text() if "run: .ci/run" in text else "")
    assert made(commands) == JOBS[job]
    targets = re.findall(r"^([a-z ]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made(commands) <= {name for line in targets for name in line.split()}


def test_workflows_have_these_jobs_and_three_kinds_of_mpi() -> None:
    assert jobs().keys() == JOBS.keys()
    (kinds,) = re.findall(r"matrix: \{mpi: \[(.*)\]\}", jobs()["mpi"])
    assert kinds.split(", ") == ["mpich-wheel", "openmpi-4", "openmpi-5"]
    assert all(jobs()["mpi"].count(f"== '{kind}'") == 1 for kind in ("openmpi-4", "openmpi-5"))


def test_recipes_are_of_this_version() -> None:
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == __version__  # type: ignore[index]
    config: dict[str, object] = {}
    exec(compile(EASYCONFIG.read_text(), EASYCONFIG.name, "exec"), config)  # an easyconfig is Python
    assert (config["name"], config["version"]) == ("hpcdl", __version__) and __version__ in EASYCONFIG.name
    assert f'version("{__version__}")' in RECIPE.read_text()
    recipe = (PACKAGING / "apptainer" / "hpcdl.def").read_text()
    assert f"Version {__version__}" in recipe
    assert set(re.findall(r"^%(\w+)", recipe, re.MULTILINE)) == {
        "files", "post", "environment", "runscript", "test", "labels",
    }  # fmt: skip
    sections = dict(zip(*[iter(re.split(r"^%(\w+)\n", recipe, flags=re.MULTILINE)[1:])] * 2, strict=True))
    copied = dict(line.split() for line in sections["files"].splitlines() if line)
    assert all((ROOT / path).exists() and to == f"/src/{path}" for path, to in copied.items())
    assert {*copied} >= {"hpcdl", "share", "docs", "setup.py", "pyproject.toml", PROJECT["readme"], "LICENSE"}
    (extras,) = re.findall(r"'/src\[(.*)\]'", sections["post"])
    assert {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}
    (prefix,) = re.findall(r"python3 -m venv (\S+)", sections["post"])
    assert f"PATH={prefix}/bin:$PATH" in sections["environment"]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [heading for heading in headings if heading != "Unreleased"]
    assert released[0].split()[0] == __version__ and "Unreleased" not in headings[1:]


def test_spacks_recipe_is_python() -> None:
    """Spack's recipe is valid Python. `make packaging` reads only the others by their tools: Spack needs git."""
    classes = [node for node in ast.parse(RECIPE.read_text()).body if isinstance(node, ast.ClassDef)]
    assert [node.name for node in classes] == ["PyHpcdl"]


@pytest.mark.soak
def test_a_wheel_works_alone(tmp_path: Path) -> None:
    """A wheel, built once and unpacked outside the checkout, has machines, examples, schemas and pages."""
    unwanted = shutil.ignore_patterns("__pycache__")
    for name in ("hpcdl", "share", "docs"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=unwanted)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, tmp_path / "source"], check=True, timeout=600)
    (wheel,) = tmp_path.glob("hpcdl-*.whl")
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", tmp_path / "site", wheel], check=True, timeout=300)
    shutil.rmtree(tmp_path / "source")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HPCDL_", "PYTHON"))}
    environment["PYTHONPATH"] = str(tmp_path / "site")
    for words in (["--version"], ["docs", "checkpoint"], ["explain", "75"], ["node", "show", "--machine", "generic"]):
        line = [sys.executable, "-P", "-m", "hpcdl", *words]
        finished = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert finished.returncode == 0, finished.stderr
    share = tmp_path / "site" / "hpcdl" / "share"
    assert {"machines", "jobs", "examples", "schemas", "references", "docs"} <= {path.name for path in share.iterdir()}
    assert (share.parent / "py.typed").exists() and len(list((share / "examples" / "digits").rglob("*.png"))) > 1000


def test_a_link_to_nowhere_hides_no_program_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a-link").symlink_to("/nowhere/at/all")
    (tmp_path / "kept").write_text("#!/bin/sh\necho kept\n")
    (tmp_path / "kept").chmod(0o755)
    (tmp_path / "other-git").symlink_to("/usr/bin/git")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HPCDL_HIDDEN": "git"}
    script = ROOT / "scripts" / "without-lab"
    line = [script, "sh", "-c", "kept; command -v other-git || echo hidden"]
    finished = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.stdout.split() == ["kept", "hidden"], finished.stderr
