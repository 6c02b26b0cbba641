"""Shards of a model's outputs hold every sample once and completely, for any number of ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.data.format.dataset import open_dataset
from hpcdl.data.format.manifest import Field
from hpcdl.data.read.reader import open_reader
from hpcdl.data.show.inspection import verify
from hpcdl.data.write.journal import PartialManifest
from hpcdl.data.write.outputs import MOST_SHARD_BYTES, Done, OutputsPlan, whole_batches
from tests.conftest import CommandLine

LOGITS = Field(name="logits", role="input", dtype="float32", shape=(3,))
SCORE = Field(name="score", role="input", dtype="float16", shape=())


def plan(num_samples: dict[str, int], batch: int = 4, shard: int = 8, identity: str = "one") -> OutputsPlan:
    return OutputsPlan(
        name="model on data", source_name="data", num_samples=num_samples, batch_size=batch, shard_samples=shard,
        fields=(LOGITS, SCORE), identity=identity,
    )  # fmt: skip


def outputs_of(samples: range) -> dict[str, np.ndarray]:
    """Outputs whose values identify their sample."""
    numbers = np.array(samples, np.float32)
    return {"logits": numbers[:, None] + np.array([0.0, 0.25, 0.5], np.float32), "score": numbers.astype(np.float16)}


def write(folder: Path, own: OutputsPlan, rank: int, num_ranks: int) -> Done:
    entries = PartialManifest(folder, rank, own.identity, "")
    found: Done = {}
    for task in own.tasks()[rank::num_ranks]:
        found[task] = own.write(folder, task, outputs_of(own.samples_of(task)))
        entries.enter(found[task])
    entries.close()
    return found


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 40), st.integers(1, 1 << 28))
def test_batches_cover_every_sample_once_and_depend_on_no_rank(train: int, val: int, batch: int, row: int) -> None:
    counts = {"train": train, "val": val}
    shard = whole_batches(counts, batch, row)
    own = plan(counts, batch, shard)
    assert shard % batch == 0 and (shard == batch or shard * row <= MOST_SHARD_BYTES)
    for split, count in counts.items():
        tasks = [task for task in own.tasks() if task[0] == split]
        assert [sample for task in tasks for sample in own.samples_of(task)] == list(range(count))
        firsts = itertools.chain.from_iterable(own.batches_of(task) for task in tasks)
        assert [*firsts] == list(range(0, count, batch)), "the same batches whatever the shards"


def test_what_is_written_is_a_data_folder(tmp_path: Path) -> None:
    own = plan({"val": 18, "test": 3})
    done, damaged = own.begin(tmp_path)
    assert (done, damaged) == ({}, [])
    for rank in range(2):
        done |= write(tmp_path, own, rank, 2)
    own.finish(tmp_path, done)
    assert not verify(tmp_path).faults
    dataset = open_dataset(str(tmp_path))
    assert {name: split.num_samples for name, split in dataset.splits.items()} == {"val": 18, "test": 3}
    reader = open_reader(dataset, dataset.splits["val"])
    ids = np.arange(18)
    logits = next(item for item in dataset.fields if item.name == "logits")
    assert np.array_equal(reader.read(logits, ids), outputs_of(range(18))["logits"])
    with h5py.File(tmp_path / "val" / "shard-00002.h5") as shard:
        assert shard["sample"][:].tolist() == [16, 17] and shard["score"].dtype == np.float16


def test_outputs_are_reported_not_trained_on(ask_hpcdl: CommandLine, tmp_path: Path) -> None:
    own = plan({"val": 3})
    own.begin(tmp_path)
    own.finish(tmp_path, write(tmp_path, own, 0, 1))
    assert f"next: hpcdl report {tmp_path}" in ask_hpcdl(["inspect", tmp_path, "--verify"]).err


def test_a_begun_folder_continues_with_what_is_whole(tmp_path: Path) -> None:
    own = plan({"val": 40})
    own.begin(tmp_path)
    write(tmp_path, own, 0, 2)
    (tmp_path / "val" / ".shard-00001.h5.0123456789abcdef.tmp").mkdir()
    damaged = tmp_path / "val" / "shard-00002.h5"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    (tmp_path / "val" / "shard-00004.h5").unlink()
    done, reported = own.begin(tmp_path)
    assert [*done] == [("val", 0)] and len(reported) == 1 and "shard-00002.h5" in reported[0]
    assert not [*tmp_path.glob("val/.*.tmp")]
    with pytest.raises(UsageError, match="other options"):
        plan({"val": 40}, identity="two").begin(tmp_path)


def test_a_finished_folder_of_other_outputs_is_not_taken(tmp_path: Path) -> None:
    own = plan({"val": 8})
    own.begin(tmp_path)
    own.finish(tmp_path, write(tmp_path, own, 0, 1))
    assert [*own.begin(tmp_path)[0]] == [("val", 0)]
    with pytest.raises(CorruptError, match="not of these outputs"):
        plan({"val": 8}, identity="two").begin(tmp_path)
