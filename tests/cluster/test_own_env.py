"""`hpcdl env create` adds a user's packages to an installation, with real environments and a real pip."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from hpcdl.cluster import own_env
from hpcdl.core.errors import UsageError
from hpcdl.core.storage.lock import writing
from tests.conftest import CommandLine

SCRIPT = """
import hpcdl; hpcdl.init()
import acme, keras, sys
print("rank", hpcdl.rank(), acme.NUMBER, sys.prefix, flush=True)
"""


def wheel(folder: Path, name: str, code: str, needs: str = "") -> Path:
    """Write a package as a wheel, as pip gets it from an index."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    requires = f"Requires-Dist: {needs}\n" if needs else ""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", code)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel(tmp_path_factory.mktemp("wheels"), "acme", "NUMBER = 42\n")


@pytest.fixture(scope="module")
def environment(session_hpcdl: CommandLine, acme: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "env"
    made = session_hpcdl(["env", "create", folder, acme])
    assert made.code == 0 and made.out.strip() == f"{folder} builds on {sys.prefix}", made.err
    assert f"next: source {folder}/bin/activate" in made.err and "no packages" not in made.err
    return folder


def run(environment: Path, line: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `line` in a shell that has activated the environment, as users do."""
    command = f"source {environment}/bin/activate && {line}"
    return subprocess.run(
        ["bash", "-c", command], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


@pytest.mark.mpi
def test_ranks_see_own_packages_and_those_of_the_installation(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run(environment, f"hpcdl run --ranks 2 --run-dir {tmp_path}/run {tmp_path}/script.py")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank} 42 {environment}" in done.stdout


def test_the_installations_own_mpi_is_the_one_in_force(environment: Path) -> None:
    here = subprocess.run(
        [sys.executable, "-m", "hpcdl.comm.mpi.library"], capture_output=True, text=True, check=True
    ).stdout
    assert run(environment, "python -m hpcdl.comm.mpi.library").stdout == here


def test_pip_keeps_to_the_installations_versions(environment: Path, tmp_path: Path) -> None:
    clash = wheel(tmp_path, "clash", "", needs="numpy<2")
    done = run(environment, f"pip install {clash}")
    assert done.returncode != 0 and "numpy" in done.stdout + done.stderr
    assert run(environment, "python -c 'import clash'").returncode != 0
    fits = wheel(tmp_path, "fits", "", needs="numpy>=1.26")
    done = run(environment, f"pip install --no-index {fits}")  # numpy is installed: nothing has to be downloaded
    assert done.returncode == 0, done.stderr
    assert not list(environment.glob("lib/python*/site-packages/numpy"))


def test_the_installation_has_nothing_new(environment: Path) -> None:
    assert subprocess.run([sys.executable, "-c", "import acme"], capture_output=True, check=False).returncode != 0


def test_a_refusal_of_pips_leaves_an_environment_that_can_be_used(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    clash = wheel(tmp_path, "clash", "", needs="numpy<2")
    made = ask_hpcdl(["env", "create", tmp_path / "env", clash])
    assert made.code == 1 and f"{tmp_path / 'env'} is ready" in made.err
    assert run(tmp_path / "env", "hpcdl --version").returncode == 0
    again = ask_hpcdl(["env", "create", tmp_path / "env"])
    assert again.code == 2 and "is such an environment already" in again.err


def test_a_folder_that_is_not_empty_is_refused_and_stays(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("mine")
    made = ask_hpcdl(["env", "create", tmp_path / "work"])
    assert made.code == 2 and "exists and is not empty" in made.err
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["thesis.tex"]


def test_a_second_call_is_refused_and_half_an_environment_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy").mkdir()
    with writing(tmp_path / "busy"), pytest.raises(UsageError, match="another hpcdl writes to"):
        own_env.create_environment(tmp_path / "busy", [])

    def stopped(folder: Path, base: Path) -> None:
        assert (folder / "pyvenv.cfg").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(own_env, "_stand_on", stopped)
    with pytest.raises(KeyboardInterrupt):
        own_env.create_environment(tmp_path / "new" / "env", [])
    assert not (tmp_path / "new").exists()
    with pytest.raises(UsageError, match="cannot write to /proc/x: No such file or directory"):
        own_env.create_environment(Path("/proc/x"), [])


@pytest.mark.parametrize("package", ["scikit-learn==1.5", "dask[array]", "numpy<2"])
def test_a_package_in_place_of_the_folder_is_refused(
    ask_hpcdl: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = ask_hpcdl(["env", "create", package, "rich"])
    assert refused.code == 2 and "reads like a package; name the folder first: hpcdl env create my-env" in refused.err
    assert not (tmp_path / package).exists()


def test_a_path_in_which_pip_would_lose_the_pins_is_refused(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    made = ask_hpcdl(["env", "create", tmp_path / "my env"])
    assert made.code == 2 and "has a blank in its path" in made.err
    assert not (tmp_path / "my env").exists()


def test_an_installation_that_is_gone_is_named(environment: Path, ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    program = (environment / "bin" / "hpcdl").read_text().replace(sys.prefix, "/no/such/installation")
    (tmp_path / "hpcdl").write_text(program)
    done = subprocess.run(["sh", str(tmp_path / "hpcdl"), "models"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "/no/such/installation is gone" in done.stderr
    line = done.stderr.strip().rpartition(": ")[2]
    assert line == f"hpcdl env create {environment}-new" and ask_hpcdl(shlex.split(line)[1:]).code == 0


def test_a_second_copy_that_hides_the_installations_is_reported_by_doctor(
    run_hpcdl: CommandLine, tmp_path: Path
) -> None:
    info = tmp_path / "numpy-1.24.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.24.0\n")
    found = run_hpcdl(["doctor", "--only", "python", "--json"], env={"PYTHONPATH": str(tmp_path)})
    texts = [finding["text"] for finding in found.json()["findings"] if finding["level"] == "warning"]
    assert len(texts) == 1 and texts[0].startswith(f"numpy 1.24.0 in {tmp_path}"), texts
    assert " hides " in texts[0]


def test_a_copy_on_a_nodes_storage_brings_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy on a node's storage includes the base installation; the test uses a small one instead of 2 GB."""
    base, own, node = (tmp_path / name for name in ("base", "own", "node"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(base)], check=True)
    (packages,) = base.glob("lib/python*/site-packages")
    (packages / "deep.py").write_text("")
    monkeypatch.setattr(sys, "prefix", str(base))
    own_env.create_environment(own, [])
    archive = own_env.pack(own, tmp_path)
    with tarfile.open(archive) as tar:
        tar.extractall(node, filter="fully_trusted")
    line = ["-c", "import deep; print(deep.__file__)"]
    for prefix, where in ((own, packages), (node, node / "hpcdl-base" / packages.relative_to(base))):
        done = subprocess.run([str(prefix / "bin/python"), *line], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(where / "deep.py")
    before = own_env.fingerprint(own)
    (packages / "more-1.0.dist-info").mkdir()
    assert own_env.fingerprint(own) != before
