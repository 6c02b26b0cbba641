"""Copies that outlive a node: any node of each group may be lost, and its state is restored bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.checkpoint import parity as parity
from hpcdl.checkpoint.background import GAPS, OFF, THREAD, BackgroundWork
from hpcdl.checkpoint.folders import Snapshot
from hpcdl.checkpoint.memory import LocalCopies, names_of, newest_common, recover, steps_in_folder
from hpcdl.checkpoint.parity import PARTNER, XOR, GroupParity, check_parity, groups_of
from hpcdl.cluster.launchers import load_launcher
from hpcdl.cluster.launchers.mpiexec import environment_for, find_mpiexec
from hpcdl.comm.observed import RankMonitor
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.config.load import ResolvedConfig, flag_layer, load
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.run.plan import prepare
from hpcdl.run.shrink import check_shrunk
from tests.checkpoint.test_checkpoints import damage_bit

STEPS = (10, 20, 30)
WAYS = (GAPS, THREAD, OFF)
LONG_S = 1000.0


def hosts_of(num_nodes: int, per_node: int) -> list[str]:
    return [f"node{rank // per_node}" for rank in range(num_nodes * per_node)]


def copies_of(
    communicator: ThreadCommunicator,
    tmp_path: Path,
    redundancy: str,
    reported: list[str],
    way: str = THREAD,
    most_patience_s: float = LONG_S,
) -> LocalCopies:
    """Return the copies of a rank; a folder represents each node's memory."""
    keeps = GroupParity(communicator, redundancy, reported.append, most_patience_s=most_patience_s)
    folder = tmp_path / communicator.host
    for rank in range(communicator.size):  # temporary names contain the process, and these ranks are threads
        if rank == communicator.rank:
            work = BackgroundWork(way, RankMonitor(rank, communicator.size, communicator.host))
            copies = LocalCopies(folder, tmp_path / "run", rank, 10, reported.append, work, keeps)
        communicator.barrier()
    return copies


def snapshot(step: int, rank: int, size: int) -> Snapshot:
    """Return a snapshot: rank 0 has the common state; ranks have different amounts of their own."""
    values = numpy.random.default_rng(step + rank)
    shared = {"weights/0": values.normal(size=size).astype(numpy.float32)} if rank == 0 else {}
    return Snapshot(step=step, shared=shared, own={"totals": values.normal(size=3 + rank)}, facts={"ranks": size})


def train(tmp_path: Path, hosts: list[str], redundancy: str, way: str = THREAD) -> dict[str, bytes]:
    """Copy STEPS on all nodes; return the content of the newest copies, by name."""
    (tmp_path / "run").mkdir(parents=True)
    reported: list[str] = []

    def body(communicator: ThreadCommunicator) -> None:
        copies = copies_of(communicator, tmp_path, redundancy, reported, way)
        for step in STEPS:
            found = snapshot(step, communicator.rank, 5000)
            copies.start(Snapshot(step=step, shared=found.shared, own=found.own, facts={"ranks": len(hosts)}), LONG_S)
            copies.wait()

    run(len(hosts), body, hosts)
    assert reported == []
    return {path.name: path.read_bytes() for path in tmp_path.glob(f"node*/{names_of(30)}") if "rank" in path.name}


def go_on(tmp_path: Path, hosts: list[str], redundancy: str, reported: list[str]) -> list[list[int]]:
    """Start new ranks on `hosts`; return the steps of which each has a complete copy."""

    def body(communicator: ThreadCommunicator) -> list[int]:
        copies = copies_of(communicator, tmp_path, redundancy, reported)
        recover(copies.folder, communicator, 0, reported.append)
        return copies.whole()

    return run(len(hosts), body, hosts)


@pytest.mark.parametrize("per_node", [1, 2])
@pytest.mark.parametrize(("num_nodes", "redundancy"), [(2, PARTNER), (3, PARTNER), (4, PARTNER), (3, XOR), (5, XOR)])
def test_any_node_may_be_lost(tmp_path: Path, num_nodes: int, per_node: int, redundancy: str) -> None:
    """Any node may be lost; another one replaces it, with nothing in its memory."""
    hosts = hosts_of(num_nodes, per_node)
    kept = train(tmp_path, hosts, redundancy)
    assert len(kept) == 2 * len(hosts)
    for lost in dict.fromkeys(hosts):
        state = tmp_path / "then" / lost
        shutil.copytree(tmp_path, state, ignore=lambda folder, names: ["then"] if "then" in names else [])
        shutil.rmtree(state / lost)
        messages: list[str] = []
        now = ["spare" if host == lost else host for host in hosts]
        answers = go_on(state, now, redundancy, messages)
        assert all(answer[0] == 30 for answer in answers)
        assert newest_common([(answer, "") for answer in answers], 0) == (30, "")
        (reported,) = messages
        assert reported.startswith(f"what {lost} held of step 30 is made again from the memory of ")
        for rank, host in enumerate(now):
            for suffix in ("npz", "json"):
                name = f"step-{30:010d}.rank-{rank}.{suffix}"
                assert (state / host / name).read_bytes() == kept[name], "bit for bit"


def test_without_room_for_the_lost_copies_a_checkpoint_serves(tmp_path: Path) -> None:
    """A name that is taken by a folder stands for a memory that is full."""
    hosts = hosts_of(3, 1)
    train(tmp_path, hosts, XOR)
    shutil.rmtree(tmp_path / "node1")
    for host in ("node0", "node2", "spare"):
        (tmp_path / host / f"step-{30:010d}.rank-1.npz").mkdir(parents=True)
    (tmp_path / "spare").chmod(0o700)
    messages: list[str] = []
    answers = go_on(tmp_path, ["node0", "spare", "node2"], XOR, messages)
    assert answers[1] == [] and newest_common([(answer, "") for answer in answers], 0)[0] is None
    (reported,) = messages
    assert "cannot hold the copies of lost ranks (Is a directory); they are not used" in reported


@pytest.mark.parametrize("redundancy", [PARTNER, XOR])
def test_parity_is_the_same_whatever_the_way(tmp_path: Path, redundancy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity is the same in all modes and slices: in gaps or, without any, on demand, in a thread, and in the step."""
    found = []
    for way, slice_bytes in (*((way, 4096) for way in WAYS), (OFF, 1 << 20)):
        monkeypatch.setattr(parity, "_SLICE_BYTES", slice_bytes)
        folder = tmp_path / f"{way}-{slice_bytes}"
        train(folder, hosts_of(4, 2), redundancy, way)
        found.append({str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("node*/step*")})
    assert found[0] == found[1] == found[2] == found[3]
    assert sum("parity" in name for name in found[0]) == 4 * 2 * 2, "of two steps on each node"


def test_a_rank_without_gaps_keeps_others_waiting_no_longer_than_it_may(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    reported: list[str] = []

    def body(communicator: ThreadCommunicator) -> None:
        copies = copies_of(communicator, tmp_path, XOR, reported, GAPS, most_patience_s=0.2)
        copies.start(snapshot(10, communicator.rank, 5000), LONG_S)
        deadline_s = time.monotonic() + 60
        while copies.is_writing:
            assert time.monotonic() < deadline_s, "nobody hurries it, and a tenth of ten such steps is long"
            time.sleep(0.01)
        copies.wait()

    run(3, body, hosts_of(3, 1))
    assert reported == [] and len([*tmp_path.glob("node*/*.parity.json")]) == 3


def test_parity_that_finds_no_room_is_reported_once_and_copies_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    reported: list[str] = []

    def full(folder: Path, num_bytes: int) -> None:
        if folder.name == "node1":
            raise OSError("2 MiB are needed, 1 MiB may be taken")

    monkeypatch.setattr(parity, "check_room", full)

    def body(communicator: ThreadCommunicator) -> list[int]:
        copies = copies_of(communicator, tmp_path, XOR, reported)
        for step in STEPS:
            copies.start(snapshot(step, communicator.rank, 5000))
            copies.wait()
        return copies.whole()

    assert run(3, body, hosts_of(3, 1)) == [[30, 20]] * 3
    assert reported == [f"node1 keeps no parity in {tmp_path / 'node1'}: 2 MiB are needed, 1 MiB may be taken"]
    assert sorted({path.parent.name for path in tmp_path.glob("node*/*.parity.json")}) == ["node0", "node2"]


def test_a_rank_that_cannot_copy_is_reported_and_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "node1").symlink_to(tmp_path / "elsewhere")
    reported: list[str] = []

    def body(communicator: ThreadCommunicator) -> list[int]:
        copies = copies_of(communicator, tmp_path, XOR, reported)
        for step in STEPS:
            assert copies.due(step)
            copies.start(snapshot(step, communicator.rank, 5000))
            copies.wait()
        return copies.whole()

    assert run(3, body, hosts_of(3, 1)) == [[30, 20], [], [30, 20]]
    assert len(reported) == 1 and "is a link" in reported[0] and not any((tmp_path / "elsewhere").iterdir())
    assert not [*tmp_path.glob("node*/*.parity.*")], "of a step that is not whole"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four MPI ranks reports, of all cases inside one mpiexec."""
    folder = tmp_path_factory.mktemp("ranks")
    mpiexec = find_mpiexec()
    line = [str(mpiexec.path), "-n", "4", sys.executable, str(Path(__file__).with_name("parity_ranks.py")), str(folder)]
    environment = {**os.environ, **environment_for(mpiexec.flavour)}
    finished = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    found: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return found


@pytest.mark.mpi
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("redundancy", [XOR, PARTNER])
def test_mpi_ranks_copy_while_steps_continue(ranks: list[dict[str, Any]], redundancy: str, way: str) -> None:
    """MPI ranks, each of which represents a node, copy their state during steps; the node of rank 1 is lost."""
    found = [of_rank[f"{redundancy}-{way}"] for of_rank in ranks]
    assert all(each["same"] for each in found), found
    reported = [text for each in found for text in each["said"]]
    left = "node0 and node2 and node3" if redundancy == XOR else "node3"
    assert reported == [f"what node1 held of step 30 is made again from the memory of {left}"]
    assert all(each["under_way"] == 0 for each in found), "every message was waited for"
    assert all((each["spent"]["in_gaps_s"] == 0) or way == GAPS for each in found)
    assert all(sum(each["spent"].values()) > 0 for each in found)


def test_fewer_ranks_find_the_copies_of_all_that_were(tmp_path: Path) -> None:
    hosts = hosts_of(4, 1)
    train(tmp_path, hosts, XOR)
    shutil.rmtree(tmp_path / "node0")
    reported: list[str] = []

    def body(communicator: ThreadCommunicator) -> list[float]:
        copies = copies_of(communicator, tmp_path, XOR, reported)
        recover(copies.folder, communicator, 0, reported.append)
        others = range(communicator.rank, 4, communicator.size)
        return [float(copies.read_own(30, rank)["totals"][0]) for rank in others]

    answers = run(3, body, hosts[1:])
    expected = [float(snapshot(30, rank, 5000).own["totals"][0]) for rank in range(4)]
    assert answers == [[expected[0], expected[3]], [expected[1]], [expected[2]]]


def test_two_of_a_group_are_too_many_and_two_pairs_lose_one_each(tmp_path: Path) -> None:
    hosts = hosts_of(4, 1)
    train(tmp_path, hosts, PARTNER)
    assert groups_of(hosts, 2) == [["node0", "node2"], ["node1", "node3"]]
    shutil.copytree(tmp_path, tmp_path / "then")
    shutil.rmtree(tmp_path / "node0")
    shutil.rmtree(tmp_path / "node1")
    reported: list[str] = []
    assert all(answer[0] == 30 for answer in go_on(tmp_path, hosts, PARTNER, reported)) and len(reported) == 2
    shutil.rmtree(tmp_path / "then" / "node0")
    shutil.rmtree(tmp_path / "then" / "node2")
    reported.clear()
    answers = go_on(tmp_path / "then", hosts, PARTNER, reported)
    assert answers[0] == answers[2] == [] and reported == [], "the checkpoint on the file system counts"


def test_parity_that_is_damaged_is_not_taken_the_step_before_is(tmp_path: Path) -> None:
    hosts = hosts_of(3, 1)
    train(tmp_path, hosts, XOR)
    shutil.rmtree(tmp_path / "node2")
    damage_bit(tmp_path / "node1" / names_of(30).replace("*", "parity.npz"))
    with pytest.raises(CorruptError, match="parity"):
        check_parity(tmp_path / "node1", names_of(30))
    reported: list[str] = []
    answers = go_on(tmp_path, hosts, XOR, reported)
    assert answers[2] == [20] and newest_common([(answer, "") for answer in answers], 0)[0] == 20


def test_memory_holds_two_steps_and_parity_is_small(tmp_path: Path) -> None:
    train(tmp_path, hosts_of(5, 1), XOR)
    for node in range(5):
        assert steps_in_folder(tmp_path / f"node{node}") == [30, 20]
    size = (tmp_path / "node0" / names_of(30).replace("*", "rank-0.npz")).stat().st_size
    parity = (tmp_path / "node3" / names_of(30).replace("*", "parity.npz")).stat().st_size
    assert parity < size / 4 + 1000, "a quarter of the largest node's, for a group of five"


def test_what_cannot_be_is_refused() -> None:
    usual = {"model": "lenet", "data": "synthetic:hep", "epochs": "1", "ranks": 4, "elastic": True}

    def resolved(**flags: object) -> ResolvedConfig[TrainConfig]:
        return load(TrainConfig, [flag_layer({**usual, **flags})])

    with pytest.raises(UsageError, match="add --local-checkpoint-every"):
        prepare(resolved(local_checkpoint_redundancy=XOR))
    asked = resolved(local_checkpoint_redundancy=XOR, local_checkpoint_every="5", strategy="async-easgd")
    with pytest.raises(UsageError, match="no steps at which all ranks"):
        prepare(asked)
    with pytest.raises(UsageError, match="this run is on one node"):
        check_shrunk(
            resolved(local_checkpoint_redundancy=XOR, local_checkpoint_every="5"),
            load_launcher("local"),
        )
