"""The requested data is recorded, and reaches the run directory however the run ends."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from hpcdl.cli.groups import with_bare_trace
from hpcdl.comm.observed import EXCHANGE, PARTS, NoRecorder, Observed, observe
from hpcdl.comm.threads import ThreadCommunicator, run
from hpcdl.config.forms import UNASKED, parse_trace
from hpcdl.config.settings import PARSERS
from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError
from hpcdl.trace import recorder
from hpcdl.trace.file import RankTrace, TraceFile, read_trace
from hpcdl.trace.recorder import COLLECTOR, KEPT_S, PREFIX, collect, file_name, recording
from hpcdl.trace.steps import merge, read_run, steps_of

SPECS = {
    "steps": "steps",
    "full": "full",
    "off": "off",
    "steps=100:110,every=50,ranks=0-7": "steps,steps=100:110,every=50,ranks=0-7",
    "ranks=0-3,8, 10-11,full": "full,ranks=0-3+8+10-11",
    "steps=7": "steps,steps=7",
    "size=1GiB,full": "full,size=1GiB",
}


@pytest.mark.parametrize("given", SPECS)
def test_a_spec_is_read_and_printed_again(given: str) -> None:
    assert PARSERS["trace"](given) == SPECS[given]
    assert parse_trace(SPECS[given]).text == SPECS[given]


@pytest.mark.parametrize(
    "given", ["", "all", "steps=9:9", "steps=b", "every=0", "every=x", "ranks=3-1", "ranks=a", "size=1KiB", "5", "x=1"]
)
def test_a_wrong_spec_says_what_is_possible(given: str) -> None:
    with pytest.raises(ValueError, match=r"write|takes"):
        parse_trace(given)


def test_which_steps_and_ranks_are_kept() -> None:
    spec = parse_trace("steps=100:110,every=50,ranks=0-1,5")
    assert [step for step in range(200) if spec.has_step(step)] == [0, 50, *range(100, 110), 150]
    assert [rank for rank in range(8) if spec.has_rank(rank)] == [0, 1, 5]
    assert parse_trace("every=3").has_step(9) and not parse_trace("every=3").has_step(10)
    assert parse_trace("full").has_step(12345) and not parse_trace("off").has_rank(0)
    assert (parse_trace(True).level, parse_trace(False).level) == ("steps", "off")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--trace", "--trace=steps"),
        ("--trace --model x", "--trace=steps --model x"),
        ("--trace full --model x", "--trace=full --model x"),
        ("--trace steps=1:2,ranks=0 -n 2", "--trace=steps=1:2,ranks=0 -n 2"),
        ("--trace=full", "--trace=full"),
        ("--model --trace --trace", "--model --trace --trace=steps"),
        ("--trace script.py --trace x", "--trace=steps script.py --trace x"),
        ("-n 2 --trace script.py", "-n 2 --trace=steps script.py"),
        ("-- --trace", "-- --trace"),
    ],
)
def test_trace_may_stand_alone(given: str, read: str) -> None:
    found = with_bare_trace(given.split(), {"--model", "-n"}.__contains__, interspersed=False)
    assert " ".join(found) == read


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node's local storage."""
    (tmp_path / "local").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "local"))
    return tmp_path / "local"


def steps_taken(group: Observed, num_steps: int = 6) -> None:
    """Take steps with an exchange by messages, and the work between steps."""
    seen, exchange = group.monitor, group.for_purpose(EXCHANGE)
    for number in range(num_steps):
        seen.doing("reading a batch", number)
        borders = [time.time()] * 3
        seen.doing("computing")
        buffer = numpy.zeros(100)
        requests = [exchange.isend(buffer, 1 - group.rank), exchange.irecv(buffer.copy(), 1 - group.rank)]
        for request in requests:
            request.wait()
        seen.step_over([*borders, time.time(), time.time(), time.time()], 0.25)
        group.allreduce(numpy.zeros(1))
    seen.doing("evaluating")
    seen.doing("evaluating")
    gc.collect()
    seen.doing("leaving")


def traced(text: str, run_dir: Path, body: Any = steps_taken, role: str = "worker") -> list[RankTrace]:
    def on_rank(communicator: ThreadCommunicator) -> None:
        group = observe(communicator)
        group.monitor.role = role
        with recording(text, group, run_dir):
            body(group)
            group.monitor.recorder.quiesced(group, last=True)
        assert isinstance(group.monitor.recorder, NoRecorder)

    run_dir.mkdir(exist_ok=True)
    (run_dir / "record.json").touch()  # every run has a record
    run(2, on_rank)
    return read_run(run_dir)


def names(trace: RankTrace) -> set[str]:
    return {trace.names[code] for code in trace.records["name"]}


def test_a_run_leaves_its_traces_and_nothing_on_the_node(tmp_path: Path, local: Path) -> None:
    traces = traced("full", tmp_path / "run")
    assert list(local.iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "run" / "trace").iterdir()) == ["rank-0.trace", "rank-1.trace"]
    for trace in traces:
        assert names(trace) >= {*PARTS, "sending", "receiving", "an all-reduce", "evaluating"}
        assert "computing" not in names(trace)
        assert len(trace.spans("evaluating")) == 1 and len(trace.spans("sending")) == 6
        assert set(trace.spans("receiving")["peer"]) == {1 - trace.rank}
        assert set(trace.spans("sending")["value"]) == {800}
        assert len(trace.points) == 2 and len({*trace.counters["name"]}) >= 4
    steps = steps_of(merge(traces), synchronous=False)
    assert steps.numbers.tolist() == list(range(6)) and steps.waited_s == pytest.approx(0.25)


@pytest.mark.long
def test_levels_steps_and_ranks_keep_what_they_say(tmp_path: Path, local: Path) -> None:
    for trace in traced("steps", tmp_path / "steps"):
        assert names(trace) >= {*PARTS, "an all-reduce"} and not names(trace) & {"sending", "receiving"}
    for trace in traced("every=4", tmp_path / "every"):
        assert set(trace.spans("compute")["step"]) == {0, 4}
    first, second = traced("ranks=1", tmp_path / "ranks")
    assert (len(first.records), len(first.counters)) == (0, 0) and len(second.spans("compute")) == 6
    assert len(first.points) == 2
    run_dir = tmp_path / "off"
    with pytest.raises(UsageError, match="trained with --trace off"):
        traced("off", run_dir)
    assert not (run_dir / "trace").exists() and list(local.iterdir()) == []


def test_unasked_the_first_ranks_leave_small_ones(tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [parse_trace(UNASKED).has_rank(rank) for rank in (0, 15, 16)] == [True, True, False]
    assert parse_trace(UNASKED).num_bytes == 1 << 20
    assert [len(trace.spans("compute")) for trace in traced(UNASKED, tmp_path / "two")] == [6, 6]
    monkeypatch.setattr(recorder, "UNASKED", "steps,ranks=0")
    (first,) = traced("steps,ranks=0", tmp_path / "run")
    assert len(first.spans("compute")) == 6 and len(first.points) == 2
    assert list(local.iterdir()) == []


def test_unasked_a_node_without_room_costs_the_trace_only(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class NoRoom(TraceFile):
        def __init__(self, path: Path, num_bytes: int, facts: Mapping[str, Any]) -> None:
            if facts["rank"] == 1:
                raise OSError(errno.ENOSPC, "no space left on device")
            super().__init__(path, num_bytes, facts)

    monkeypatch.setattr(recorder, "TraceFile", NoRoom)
    with pytest.raises(UsageError, match="holds no trace"):  # an error of the reader: the run itself ended well
        traced(UNASKED, tmp_path / "run")
    reported = capfd.readouterr().err
    assert reported.count("warning: this run keeps no trace: ") == 1 and "no space left on device" in reported
    assert list(local.iterdir()) == [] and list((tmp_path / "run" / "trace").iterdir()) == []
    with pytest.raises(HpcdlError, match="set TMPDIR, or --trace off"):
        traced("steps", tmp_path / "asked")


def test_what_killed_ranks_left_goes_after_a_day_and_what_is_written_stays(tmp_path: Path, local: Path) -> None:
    day_ago = time.time() - 2 * KEPT_S
    folders = {name: local / f"{PREFIX}{os.geteuid()}-{name}" for name in ("alive", "left", "fresh")}
    for folder in folders.values():
        folder.mkdir(mode=0o700)
        TraceFile(folder / "rank-0.trace", 1 << 20, {}).close()
    alive = TraceFile(folders["alive"] / "rank-1.trace", 1 << 20, {})
    for name in ("alive", "left"):
        os.utime(folders[name], (day_ago, day_ago))
    traced("steps", tmp_path / "run")
    alive.close()
    assert [name for name, folder in folders.items() if folder.exists()] == ["alive", "fresh"]


@pytest.mark.long
def test_a_resumed_run_replaces_the_traces(tmp_path: Path, local: Path) -> None:
    traced("full", tmp_path / "run")
    traced("steps", tmp_path / "run", lambda group: steps_taken(group, 2))
    assert {len(trace.spans("compute")) for trace in read_run(tmp_path / "run")} == {2}


def test_an_error_and_an_early_stop_keep_them(tmp_path: Path, local: Path) -> None:
    for kind, points in ((StoppedEarly, 2), (HpcdlError, 1)):

        def body(group: Observed, kind: type[HpcdlError] = kind) -> None:
            steps_taken(group)
            raise kind("enough")

        with pytest.raises(HpcdlError, match="enough"):
            traced("steps", tmp_path / kind.__name__, body)
        for trace in read_run(tmp_path / kind.__name__):
            assert len(trace.spans("compute")) == 6 and len(trace.points) == points
    assert list(local.iterdir()) == []


def test_what_a_killed_rank_has_left_is_fetched_once(tmp_path: Path, local: Path) -> None:
    run_dir = tmp_path / "run"
    traced("steps", run_dir)
    left = local / f"{PREFIX}x" / file_name(1)
    left.parent.mkdir(mode=0o700)
    shutil.move(run_dir / "trace" / file_name(1), left)
    place = run_dir / "trace" / "rank-1.place"
    place.write_text(f"{os.uname().nodename}\n{left}\n")
    assert collect(run_dir) == [] and read_trace(run_dir / "trace" / file_name(1)).rank == 1
    assert list(local.iterdir()) == [] and not place.exists()
    place.write_text(f"elsewhere\n{left}\n")
    with pytest.raises(UsageError, match=r"rank-1: its trace was left on elsewhere in .*; copy it into"):
        read_run(run_dir)
    precious = tmp_path / file_name(1)
    precious.write_text("mine")
    place.write_text(f"{os.uname().nodename}\n{precious}\n")  # not a path that hpcdl creates
    assert len(collect(run_dir)) == 1 and precious.exists()


def test_a_node_without_room_says_so(tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(HpcdlError, match="set TMPDIR"):
        traced("steps", tmp_path / "run")


def test_the_collector_is_seen(tmp_path: Path, local: Path) -> None:
    def body(group: Observed) -> None:
        group.monitor.doing("reading a batch", 3)
        kept = [[number] for number in range(200_000)]
        gc.collect()
        assert kept

    found = [trace.spans(COLLECTOR) for trace in traced("steps", tmp_path / "run", body)]
    assert any(len(spans) and 3 in spans["step"] for spans in found)


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 0, 1, 2], [1, 2, 3, 4, 5, 6], [41, 42, 43, 44, 45, 46]])
def test_steps_of_a_script_continue_over_epochs(tmp_path: Path, local: Path, numbers: list[int]) -> None:
    """A script's steps count on over epochs, though Keras counts from 0 in each, and a loop from 1 or its resumed
    step.
    """

    def body(group: Observed) -> None:
        seen = group.monitor
        for number in numbers:
            began_s = time.monotonic()
            seen.recorder.span("bucket", began_s, began_s + 0.001, bucket=0)
            time.sleep(0.005)
            seen.doing("epoch 1", number)

    for trace in traced("steps", tmp_path / "run", body, role="script"):
        computed = trace.spans("compute")
        assert computed["step"].tolist() == [0, 1, 2, 3, 4]
        whole_s = trace.spans("other")["end_s"] - trace.spans("input")["begin_s"]
        assert whole_s.min() > 0.004 and whole_s.max() < 60
        assert (computed["end_s"] >= computed["begin_s"]).all()
