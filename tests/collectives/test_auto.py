"""The measured table: agreed by all ranks, kept for the next run, measured again when damaged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.collectives import auto
from hpcdl.collectives import auto as measuring
from hpcdl.collectives.auto import CANDIDATES, Row, Timetable, load_table, measure, save_table, table_file
from hpcdl.collectives.slices import Workspace
from hpcdl.comm.threads import ThreadCommunicator, run

TABLE = Timetable(
    library="threads",
    ranks=3,
    nodes=1,
    rows=[
        Row(bytes=1 << 10, seconds={"tree": 1.0, "ring": 2.0}),
        Row(bytes=1 << 20, seconds={"tree": 2.0, "ring": 1.0}),
    ],
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path


def chosen(communicator: ThreadCommunicator) -> list[str]:
    workspace = Workspace()
    return [auto.choose(communicator, num_bytes, workspace) for num_bytes in (0, 1000, 1 << 14, 1 << 16, 1 << 30)]


def place() -> Path:
    return table_file("threads", 3, 1, run(1, lambda communicator: communicator.host)[0])


def test_the_nearest_measured_size_counts() -> None:
    save_table(place(), TABLE)
    assert run(3, chosen) == [["tree", "tree", "tree", "ring", "ring"]] * 3


def test_the_table_decides_what_runs() -> None:
    save_table(place(), dataclasses.replace(TABLE, rows=[Row(bytes=8, seconds={"mpi": 1.0})]))

    def body(communicator: ThreadCommunicator) -> Any:
        from tests.rounds import TracingCommunicator

        tracer = TracingCommunicator(communicator)
        buffer = numpy.ones(10)
        auto.allreduce(tracer, buffer, workspace := Workspace())
        return tracer.counts.library_calls, tracer.counts.messages, buffer[0], workspace.chosen

    assert run(3, body) == [(1, 0, 3, {80: "mpi"})] * 3


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"schema": "hpcdl.allreduce/2"}', '{"schema": "other/1"}', "unknown"]
)
def test_without_a_usable_table_one_is_measured_and_kept(damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SIZES", (64, 4096))
    path = place()
    path.parent.mkdir(parents=True)
    if damage == "unknown":  # a table of a version that had other algorithms
        save_table(path, dataclasses.replace(TABLE, rows=[Row(bytes=8, seconds={"teleport": 1.0})]))
    elif damage:
        path.write_text(damage)
    choices = run(3, chosen)
    assert choices[0] == choices[1] == choices[2]
    kept = load_table(path)
    assert kept is not None and [row.bytes for row in kept.rows] == [64, 4096]
    assert all(set(row.seconds) == set(CANDIDATES) for row in kept.rows)
    assert run(3, chosen) == choices, "the next run reads what this one measured"


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "SIZES", (64,))
    blocked = cache / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert set(run(2, chosen)[0]) <= set(CANDIDATES)


def test_measured_times_are_the_same_on_every_rank() -> None:
    tables = run(3, lambda communicator: measure(communicator, [400], repeats=2))
    assert tables[0] == tables[1] == tables[2]
    assert all(seconds > 0 for seconds in tables[0].rows[0].seconds.values())


def test_the_file_is_one_for_each_library_and_shape() -> None:
    same = table_file("MPICH 5.0.2", 8, 2, "cpu012.cluster") == table_file("MPICH 5.0.2", 8, 2, "cpu7")
    others = {table_file(*key) for key in [("MPICH 5", 8, 2, "a"), ("MPICH 5", 4, 2, "a"), ("MPICH 5", 8, 1, "a"),
                                           ("MPICH 5", 8, 2, "b"), ("Open MPI 4", 8, 2, "a")]}  # fmt: skip
    assert same and len(others) == 5
    assert "/" not in table_file("../../x", 1, 1, "../y").name


def test_a_table_survives_the_file(tmp_path: Path) -> None:
    save_table(tmp_path / "table.json", TABLE)
    assert json.loads((tmp_path / "table.json").read_text())["schema"] == "hpcdl.allreduce/3"
    loaded = load_table(tmp_path / "table.json")
    assert loaded is not None and loaded.best(1 << 20) == "ring" and loaded.ranks == 3
    assert load_table(tmp_path / "missing.json") is None


def test_a_disturbed_try_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disturbed measurement does not choose: on a busy node some take a hundred times longer.

    A size that takes long is measured at least twice.
    """
    tries = {"ring": iter([9.0, *[5.0, 0.1] * 3]), "tree": iter([9.0, *[0.2] * 6])}
    monkeypatch.setattr(measuring, "_time_once", lambda group, name, num_bytes, workspace: next(tries[name]))

    def body(communicator: ThreadCommunicator) -> tuple[Timetable, Timetable]:
        quickest = measure(communicator, [8], names=("ring", "tree"), repeats=4, of_tries=min)
        tries.update(ring=iter([9.0] * 9), tree=iter([9.0] * 9))
        return quickest, measure(communicator, [8], names=("ring", "tree"), repeats=4, time_limit_s=1.0)

    ((quickest, _),) = run(1, body)
    assert quickest.rows[0].seconds == {"ring": 0.1, "tree": 0.2} and quickest.best(8) == "ring"
    assert [len([*left]) for left in tries.values()] == [6, 6], "one to warm up, and two"


def test_an_algorithm_that_is_far_behind_is_not_timed_where_a_call_may_take_a_second() -> None:
    """An algorithm that is far behind is not timed for calls near a second; large sizes are measured, not guessed."""
    seconds = {"ring": {1: 1.0, 32 << 20: 4.0}, "mpi": {1: 0.9, 32 << 20: 6.0}, "tree": {1: 2.0}}
    asked = []

    def timed(group: Any, name: str, num_bytes: int, workspace: Workspace) -> float:
        asked.append((name, num_bytes))
        return seconds[name][num_bytes]

    def body(communicator: ThreadCommunicator) -> Timetable:
        return measure(communicator, [1, 32 << 20], names=("ring", "mpi", "tree"), repeats=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_time_once", timed)
        (table,) = run(1, body)
    assert table.best(1) == "mpi" and table.best(25 << 20) == "ring"
    assert {name for name, num_bytes in asked if num_bytes > 1} == {"ring", "mpi"}
