"""Shares of nodes: which samples a node reads, which shards are copied to it, and that each byte is read once."""

from __future__ import annotations

import dataclasses
import threading
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.core.errors import HpcdlError, UsageError
from hpcdl.core.protocols import Communicator
from hpcdl.data.format.dataset import Dataset, open_dataset
from hpcdl.data.format.order import Layout, NodeShare, pass_slice
from hpcdl.data.read import staging
from hpcdl.data.read.staging import resident, staged
from hpcdl.data.read.windows import open_stream, shared_out
from tests.data.sharding import contents, everything, make

SAMPLES, SHARDS = 420, 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shares") / "data"
    make("synthetic:mnist", folder, samples=SAMPLES, shards=SHARDS, split="train=0.8,val=0.2", max_ranks=16)
    return folder


@given(
    by_shard=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    block=st.integers(1, 9),
    nodes=st.lists(st.integers(0, 4), min_size=1, max_size=9),
)
@settings(max_examples=60)
def test_the_shares_of_all_nodes_are_the_data_set(by_shard: list[int], block: int, nodes: list[int]) -> None:
    layout = Layout.of_shards(by_shard, block, 3)
    numbers = [sorted(set(nodes)).index(node) for node in nodes]
    ids: list[int] = []
    for node in range(len(set(numbers))):
        shares = [NodeShare.of(numbers, worker) for worker, other in enumerate(numbers) if other == node]
        assert [share.worker for share in shares] == list(range(shares[0].num_workers))
        parts = [layout.part(share) for share in shares]
        assert all(np.array_equal(part.starts, parts[0].starts) for part in parts)
        ids += range(int(parts[0].starts[0]), int(parts[0].starts[-1]))
        by_workers = layout.num_blocks * len(shares) / len(numbers)
        assert abs(parts[0].num_blocks - by_workers) < 1
    assert ids == list(range(layout.num_samples))


@given(num=st.integers(0, 50), workers=st.integers(1, 7))
def test_a_pass_in_order_holds_every_sample_once(num: int, workers: int) -> None:
    found = [sample for worker in range(workers) for sample in pass_slice(num, worker, workers)]
    assert found == list(range(num))


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 2)], ids=str)
def test_workers_read_their_own_nodes_share_and_all_of_it(data: Path, nodes: tuple[int, ...]) -> None:
    dataset = dataclasses.replace(open_dataset(str(data)), nodes=nodes)
    assert dataset.manifest is not None
    images, labels = everything(data, dataset.manifest, "train")
    seen: dict[int, set[int]] = {}
    for worker, node in enumerate(nodes):
        stream = open_stream(dataset, batch_size=4, worker=worker, num_workers=4, seed=3)
        steps = 3 * stream.steps_per_epoch  # the samples dropped at the end differ between epochs
        for step in range(steps):
            ids = stream.ids(step)
            batch, found = stream.batch(step)
            assert np.array_equal(batch, images[ids]) and np.array_equal(found, labels[ids])
            seen.setdefault(node, set()).update(ids.tolist())
        late = open_stream(dataset, batch_size=4, worker=worker, num_workers=4, seed=3)
        assert np.array_equal(late.ids(steps - 1), stream.ids(steps - 1))  # any step can come first
        for item in (stream, late):
            item.close()
    assert all(not one & two for a, one in seen.items() for b, two in seen.items() if a < b)
    assert len(set.union(*seen.values())) >= len(labels) - 4 * len(seen)


def test_workers_of_a_node_train_on_different_samples(data: Path) -> None:
    dataset = dataclasses.replace(open_dataset(str(data)), nodes=(0, 1, 1, 0))
    streams = [open_stream(dataset, batch_size=8, worker=worker, num_workers=4, seed=1) for worker in range(4)]
    epoch = [sample for stream in streams for step in range(stream.steps_per_epoch) for sample in stream.ids(step)]
    assert len(set(epoch)) == len(epoch)
    for stream in streams:
        stream.close()


def test_a_share_that_is_smaller_than_a_step_is_refused(data: Path) -> None:
    dataset, hosts = open_dataset(str(data)), ["b", "a", "a"]
    assert shared_out(dataset, hosts, 60).nodes == (0, 1, 1)
    with pytest.raises(UsageError, match=r"a node's share is \d+ samples here, and its 1 workers take 200"):
        shared_out(dataset, hosts, 200)


HOSTS = ["a", "b", "a", "c"]


def shards_of(folder: Path | None) -> dict[str, str]:
    assert folder is not None
    return {name: digest for name, digest in contents(folder).items() if name.endswith(".h5")}


@pytest.fixture
def reads(data: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the pieces of each shard that all ranks read from the source."""
    found: Counter[str] = Counter()
    lock = threading.Lock()
    real, alone = staging._pieces, staging._copy_shard

    def counted(source: Path, target: Path, numbers: range, shards: Any) -> Iterator[tuple[int, Any]]:
        for number, piece in real(source, target, numbers, shards):
            with lock:
                found[shards[number].file] += len(piece)
            yield number, piece

    def counted_alone(source: Path, target: Path, shard: Any) -> None:
        with lock:
            found[shard.file] += shard.num_bytes
        alone(source, target, shard)

    monkeypatch.setattr(staging, "_COPY_BYTES", 10_000)
    monkeypatch.setattr(staging, "_pieces", counted)
    monkeypatch.setattr(staging, "_copy_shard", counted_alone)
    return found


def test_what_all_nodes_get_is_read_once_and_passed_on(data: Path, tmp_path: Path, reads: Counter[str]) -> None:
    dataset = open_dataset(str(data))
    assert dataset.manifest is not None
    sizes = {shard.file: shard.num_bytes for shard in dataset.manifest.shards()}
    lines: list[str] = []

    def rank(communicator: ThreadCommunicator) -> dict[str, str]:
        with staged(dataset, tmp_path, communicator, log=lines.append) as near:
            return shards_of(near.folder)

    assert run(4, rank, HOSTS) == [shards_of(data)] * 4
    assert reads == sizes
    assert set(lines) == {lines[0]} and "on each of 3 nodes: all training shards, read once and passed on" in lines[0]
    assert not list(tmp_path.iterdir())


def test_a_node_gets_what_its_ranks_read(data: Path, tmp_path: Path, reads: Counter[str]) -> None:
    dataset = dataclasses.replace(open_dataset(str(data)), nodes=(0, 1, 0, 2))
    held_out = dataset.evaluation_split
    assert held_out is not None and dataset.manifest is not None
    lines: list[str] = []

    def rank(communicator: ThreadCommunicator) -> set[str]:
        own = pass_slice(held_out.num_samples, communicator.rank, 4)
        with staged(dataset, tmp_path, communicator, held_out=own, log=lines.append) as near:
            stream = open_stream(near, batch_size=8, worker=communicator.rank, num_workers=4, seed=1)
            far = open_stream(dataset, batch_size=8, worker=communicator.rank, num_workers=4, seed=1)
            for step in range(2 * stream.steps_per_epoch):
                assert np.array_equal(stream.batch(step)[0], far.batch(step)[0])
            for item in (stream, far):
                item.close()
            return set(shards_of(near.folder))

    found = run(4, rank, HOSTS)
    assert found[0] == found[2]
    copied = [sorted(name for name in found[rank] if name.startswith("train/")) for rank in (0, 1, 3)]
    assert [len(names) for names in copied] == [3, 2, 2]  # half of the six shards, then the quarters
    assert set().union(*found) == set(shards_of(data))
    total = sum(shard.num_bytes for shard in dataset.manifest.shards())
    assert sum(reads.values()) < 1.4 * total
    assert " on each of 3 nodes: its share of the training shards" in lines[0]


@given(
    parts=st.lists(
        st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), min_size=1, max_size=4), min_size=1, max_size=4
    )
)
def test_rows_of_shards_are_what_they_hold(parts: list[list[tuple[int, int]]]) -> None:
    nodes = [{range(start, start + count) for start, count in found} for found in parts]
    for found in nodes:
        numbers = [number for row in staging._rows(found) for number in row]
        assert numbers == sorted(set().union(*found))
    everybody = set.intersection(*(set().union(*found) for found in nodes))
    common = set(staging._common(nodes))
    assert common <= everybody
    if all(len(staging._rows(found)) == 1 for found in nodes):
        assert common == everybody


def test_staging_is_planned_at_once_for_many_shards_and_nodes(data: Path) -> None:
    """Planning is quick for 20,000 shards on 2,000 nodes: no rank lists the shards of all nodes."""
    dataset = open_dataset(str(data))
    entry = dataset.train_split.entry
    assert entry is not None
    many = dataclasses.replace(entry, shards=[entry.shards[0]] * 20_000)
    split = dataclasses.replace(dataset.train_split, entry=many, num_samples=20_000 * entry.shards[0].num_samples)
    large = dataclasses.replace(dataset, splits={"train": split})

    class Group:
        rank, size, host = 7, 2000, "n7"

        def allgather_json(self, value: Any) -> list[Any]:
            return [[f"n{rank}", *value[1:]] for rank in range(self.size)]

    tracemalloc.start()
    wanted = staging._wanted(large, cast(Communicator, Group()), None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(wanted.own) == len(wanted.common) == 20_000 and len(wanted.by_node) == 2000
    assert wanted.leads and peak < 64e6


def test_who_evaluates_nothing_gets_nothing_of_it(data: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(data))

    def rank(communicator: ThreadCommunicator) -> int:
        held_out = range(84 if communicator.rank == 0 else 0)
        with staged(dataset, tmp_path, communicator, held_out=held_out) as near:
            return sum(name.startswith("val/") for name in shards_of(near.folder))

    assert run(2, rank, ["a", "b"]) == [SHARDS, 0]


@pytest.mark.parametrize("passed_on", [True, False])
def test_a_node_that_cannot_copy_is_reported_by_all(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passed_on: bool
) -> None:
    """If one node's disk is full or a shard disappears, every rank stops with the same message."""
    dataset = open_dataset(str(data))
    real, alone, second = staging._append, staging._copy_shard, threading.local()

    def full(content: Any, target: Path, shard: Any) -> None:
        if getattr(second, "host", ""):
            raise HpcdlError(f"cannot copy {shard.file} to {target.parent}: No space left on device")
        real(content, target, shard)

    def full_alone(source: Path, target: Path, shard: Any) -> None:
        if getattr(second, "host", ""):
            raise HpcdlError(f"cannot copy {shard.file} to {target.parent}: No space left on device")
        alone(source, target, shard)

    monkeypatch.setattr(staging, "_append", full)
    monkeypatch.setattr(staging, "_copy_shard", full_alone)

    def rank(communicator: ThreadCommunicator) -> str:
        second.host = communicator.host if communicator.host == "b" else ""
        try:
            with staged(dataset, tmp_path, communicator, passed_on=passed_on):
                return "copied"
        except HpcdlError as error:
            return str(error)

    words = run(4, rank, HOSTS)
    _named_once(words, HOSTS, "b")
    assert all(
        "cannot copy train/shard-" in reported and reported.endswith("No space left on device") for reported in words
    )
    assert not list(tmp_path.iterdir())


def _named_once(words: list[str], hosts: list[str], host: str) -> None:
    """Who hears of a rank's problem adds the rank: it says its problem alone, all others whose it is."""
    rank = hosts.index(host)
    others = {reported for number, reported in enumerate(words) if number != rank}
    assert others == {f"rank {rank} on {host}: {words[rank]}"}


def test_a_shard_that_is_gone_is_named(data: Path, tmp_path: Path) -> None:
    make("synthetic:mnist", tmp_path / "data", samples=100, shards=3)
    dataset = open_dataset(str(tmp_path / "data"))
    gone = sorted((tmp_path / "data").rglob("*.h5"))[1]
    gone.unlink()
    (tmp_path / "near").mkdir()

    def rank(communicator: ThreadCommunicator) -> str:
        with pytest.raises(HpcdlError) as caught, staged(dataset, tmp_path / "near", communicator):
            pass
        return str(caught.value)

    words = run(3, rank, ["a", "b", "c"])
    _named_once(words, ["a", "b", "c"], "b")
    assert all(f"{gone.name} to" in reported and "No such file" in reported for reported in words)
    assert not list((tmp_path / "near").iterdir())


def test_copies_in_memory_are_of_the_share_alone(data: Path) -> None:
    dataset: Dataset = dataclasses.replace(open_dataset(str(data)), nodes=(0, 1))
    held = [set(resident(dataset, worker).copies) for worker in (0, 1)]
    assert [len(copies) for copies in held] == [3, 3] and not held[0] & held[1]
