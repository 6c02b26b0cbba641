"""Fixtures shared by the tests of this folder: one run, and a folder that two users can reach."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import CommandLine

TRAIN = ["train", "--model", "lenet", "--data", "synthetic:mnist@200", "--batch-size", "16", "--profile", "none"]
SAVING = [*TRAIN, "--checkpoint-every", "0.001s", "--keep-checkpoints", "2"]


@pytest.fixture(scope="module")
def trained(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of eight steps with a model, a trace and two checkpoints. Read only."""
    run = tmp_path_factory.mktemp("trained") / "run"
    finished = session_hpcdl([*SAVING, "--steps", "8", "--run-dir", run])
    assert finished.code == 0 and len([*run.glob("checkpoints/step-*")]) == 2, finished.err
    return run


@pytest.fixture(scope="module")
def data(session_hpcdl: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data folder. Read only."""
    folder = tmp_path_factory.mktemp("data") / "data"
    finished = session_hpcdl(["shard", "synthetic:mnist@40", folder, "--split", "train=0.5,val=0.5"])
    assert finished.code == 0, finished.err
    return folder


@pytest.fixture(scope="module")
def public() -> Iterator[Path]:
    """A folder that every user may enter; pytest's own are private."""
    folder = Path(tempfile.mkdtemp(prefix="hpcdl-two-users-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
