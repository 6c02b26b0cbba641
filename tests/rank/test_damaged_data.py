"""Damaged data ends a run of any strategy: exit code 3, one line with shard and block, no weights from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpcdl.config.load import Layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.data.format.hdf5 import shard_map
from hpcdl.run.plan import prepare
from hpcdl.strategies.table import STRATEGIES
from tests.conftest import CommandLine

SAMPLE = ("async-easgd",)
"""It could continue without a failed worker; tests/strategies/test_failing_steps.py has synchronous steps."""
pytestmark = pytest.mark.mpi


def damaged(shards: Path, folder: Path, split: str) -> Path:
    """Return a copy of the shards in which one block of `split` has a flipped bit."""
    shutil.copytree(shards, folder)
    path = sorted((folder / split).glob("*.h5"))[0]
    content = bytearray(path.read_bytes())
    content[int(shard_map(path).block_offsets[-1])] ^= 1
    path.write_bytes(content)
    return folder


def words(strategy: str, data: Path, run_dir: Path) -> list[str | Path]:
    features = STRATEGIES[strategy].features
    ranks = 1 if strategy == "single" else 3 if features.servers else 2
    return [
        "train", "--model", "lenet", "--strategy", strategy, "--ranks", str(ranks), "--batch-size", "16",
        "--data", data, "--profile", "none", "--epochs", "2", "--checkpoint-every", "1h", "--run-dir", run_dir,
        *([] if features.mpi else ["--allow-grpc"]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "strategy", [name if name in SAMPLE else pytest.param(name, marks=pytest.mark.soak) for name in STRATEGIES]
)
def test_a_damaged_block_ends_the_run(strategy: str, session_hpcdl: CommandLine, shards: Path, tmp_path: Path) -> None:
    data, run_dir = damaged(shards, tmp_path / "data", "train"), tmp_path / "run"
    finished = session_hpcdl(words(strategy, data, run_dir), timeout_s=110)
    assert finished.code == 3, finished.err
    last = finished.err.splitlines()[-1]
    assert last.startswith("hpcdl: ") and "train/shard-00000.h5: block " in last and "is damaged" in last, last
    assert "Traceback" not in finished.err and "{{" not in finished.err
    assert not (run_dir / "model.keras").exists() and not list(run_dir.glob("checkpoints/*"))


@pytest.mark.soak
def test_a_damaged_block_of_the_held_out_split_ends_it_too(
    session_hpcdl: CommandLine, shards: Path, tmp_path: Path
) -> None:
    data = damaged(shards, tmp_path / "data", "val")
    finished = session_hpcdl(words("async-easgd", data, tmp_path / "run"), timeout_s=110)
    assert finished.code == 3 and "val/shard-00000.h5: block " in finished.err, finished.err


def test_the_check_can_be_turned_off(shards: Path) -> None:
    for words, verified in (({}, True), ({"verify-data": "false"}, False)):
        layer = Layer(origin="test", values={"model": "lenet", "data": str(shards), "strategy": "single", **words})
        assert prepare(load(TrainConfig, [layer])).dataset.verified is verified
