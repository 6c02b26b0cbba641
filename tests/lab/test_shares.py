"""Data over several nodes: what each node copies to itself and trains on, under Slurm with ranks on four nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from hpcdl.strategies.table import STRATEGIES
from tests.conftest import DIGITS, CommandLine
from tests.lab.desk import Desk
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab

NORMAL = ("async-easgd",)
"""A strategy with a server, which has no data; the others run in the long version."""
CASES = [
    pytest.param(name, way, marks=[] if name in NORMAL and way == "local" else pytest.mark.soak)
    for name in STRATEGIES if name != "single" for way in ("global", "local")
]  # fmt: skip


@pytest.fixture(scope="module")
def desk(lab_slurm: SlurmLab, session_hpcdl: CommandLine) -> Iterator[Desk]:
    folder = lab_slurm.shared / "shares"
    folder.mkdir()
    shape = ["--image-size", "28", "--split", "train=0.8,val=0.2", "--shards", "8"]
    assert session_hpcdl(["shard", DIGITS, folder / "shards", *shape]).code == 0
    yield Desk(lab_slurm, folder)
    lab_slurm.cancel_all()


@pytest.mark.parametrize(("strategy", "way"), CASES)
def test_nodes_copy_and_shuffle_what_they_train_on(desk: Desk, strategy: str, way: str) -> None:
    run = f"{strategy}-{way}"
    number = desk.submit(
        "--nodes", "4", "--time", "10m", "--", "--model", "lenet", "--data", "shards", "--batch-size", "8",
        "--steps", "20", "--learning-rate", "0.001", "--strategy", strategy, "--shuffle", way, "--stage", "/tmp",
        "--allow-grpc", run=run,
    )  # fmt: skip
    job = desk.lab.wait_for_job(number, timeout_s=400)
    assert job["JobState"] == "COMPLETED", desk.log(number)
    record = json.loads((desk.folder / run / "record.json").read_text())
    assert (record["status"], record["nodes"]) == ("finished", 4)
    journal = (desk.folder / run / "metrics.jsonl").read_text()
    workers = record["workers"]  # one on each node; a server has no data
    shuffled = f"each of {workers} nodes shuffles and reads its own share of the training samples"
    assert (shuffled in journal) == (way == "local"), journal
    passed_on = ", read once and passed on" if STRATEGIES[strategy].features.mpi else ", and"
    copied = "its share of the training shards" if way == "local" else f"all training shards{passed_on}"
    assert f" on each of {workers} nodes: {copied}" in journal, journal
    for node in desk.lab.nodes:
        left = desk.lab.run(["ls", "-A", "/tmp"], host=node).out
        assert "hpcdl-root" not in left, left
