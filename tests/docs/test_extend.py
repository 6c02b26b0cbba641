"""The package of docs/how-to/extend.md, which `hpcdl examples extension` copies, is found by its entry points."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT, CommandLine
from tests.training_runs import record_of

EXAMPLE = ROOT / "share" / "hpcdl" / "examples" / "extension"
PAGE = ROOT / "docs" / "how-to" / "extend.md"
FILES = ("pyproject.toml", "acme/info.py", "acme/mean.py", "acme/source.py", "acme/launcher.py")
LENET = ["--model", "lenet", "--data", "synthetic:mnist@128", "--ranks", "2", "--batch-size", "16", "--steps", "4"]
SAME = ["--deterministic", "--profile", "none"]


def installed(folder: Path, files: dict[str, str]) -> Path:
    """Return the folder into which `pip install` has installed a package of `files`."""
    package, target = folder / "package", folder / "installed"
    (package / "acme").mkdir(parents=True)
    for name, text in {"acme/__init__.py": "", **files}.items():
        (package / name).write_text(text)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", target, package], check=True, capture_output=True, text=True)
    return target


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment with the package installed."""
    target = installed(tmp_path_factory.mktemp("acme"), {name: (EXAMPLE / name).read_text() for name in FILES})
    return {"PYTHONPATH": str(target)}


def test_the_page_names_every_file() -> None:
    files = [str(path.relative_to(EXAMPLE)) for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml")]
    assert sorted(files) == sorted([*FILES, "acme/__init__.py"])
    assert [name for name in FILES if f"`{name}`" not in PAGE.read_text()] == []


@pytest.mark.mpi
def test_the_strategy_trains_as_ring_does(run_hpcdl: CommandLine, acme: dict[str, str]) -> None:
    listed = run_hpcdl(["strategies", "--json"], env=acme).json()["strategies"]
    assert "acme-mean" in [one["name"] for one in listed]
    losses = {}
    for name in ("ring", "acme-mean"):
        found = run_hpcdl(["train", "--strategy", name, "--run-dir", name, *LENET, *SAME], env=acme)
        assert found.code == 0, found.err
        losses[name] = record_of(run_hpcdl.home / name)["history"][-1]["loss"]
    assert losses["acme-mean"] == pytest.approx(losses["ring"], rel=1e-5)


@pytest.mark.long
def test_the_source_is_recognised_and_asked_last(run_hpcdl: CommandLine, acme: dict[str, str], tmp_path: Path) -> None:
    rows = np.random.default_rng(1).random((40, 4)).round(3)
    table = np.column_stack([rows, np.arange(40) % 3])
    np.savetxt(tmp_path / "numbers.acme", table, fmt="%g")
    source, shards = tmp_path / "numbers.acme", tmp_path / "shards"
    assert run_hpcdl(["shard", source, shards]).code == 2, "nobody knows it without the package"
    made = run_hpcdl(["shard", source, shards, "--split", "train=0.8,val=0.2"], env=acme)
    assert made.code == 0, made.err
    assert run_hpcdl(["inspect", shards, "--verify"], env=acme).code == 0


def test_the_launcher_is_tried_before_the_local_one(acme: dict[str, str]) -> None:
    code = (
        "from hpcdl.cluster.launchers import find_launcher as find\nprint(find({}).name, find({'ACME_JOB': '1'}).name)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env=acme, cwd=ROOT, capture_output=True, text=True, check=True
    )  # fmt: skip
    assert found.stdout.split() == ["local", "acme"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ring", "acme.info:RING", ["'ring' is in hpcdl and in acme 1.0"]),
        ("mine", "acme.gone:MINE", ["'mine' of acme 1.0 does not load", "acme.gone"]),
        ("mine", "acme:NAME", ["'mine' of acme 1.0", "must be a StrategyInfo"]),
    ],
)
def test_what_is_wrong_names_the_package(
    run_hpcdl: CommandLine, tmp_path: Path, name: str, value: str, words: list[str]
) -> None:
    project = (
        f'[project]\nname = "acme"\nversion = "1.0"\n[project.entry-points."hpcdl.strategies"]\n{name} = "{value}"\n'
    )
    project += '[tool.setuptools]\npackages = ["acme"]\n'
    files = {"pyproject.toml": project, "acme/__init__.py": "NAME = 'text'\n"}
    own = {"PYTHONPATH": str(installed(tmp_path, files))}
    refused = run_hpcdl(["train", "--strategy", name, "--run-dir", "run", *LENET], env=own)
    assert refused.code == 2 and len(refused.err.splitlines()) == 1
    assert all(word in refused.err for word in words)
