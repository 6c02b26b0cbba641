"""A run has one clock, which setting the system clock does not move; all other readers of that clock are listed."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdl.core.processes.wall import WallClock

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("hpcdl", "scripts", "benchmarks")
READS_AN_ARGUMENT = {"strftime": 1, "localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0}
"""Functions of `time` that read the clock unless called with a time, and the index of that argument."""
READS = {"time", "time_ns", "clock_gettime", "clock_gettime_ns"}
OF_DATETIME = {"now", "utcnow", "today"}
STAMPS = re.compile(r"(st_[amc]time|st_birthtime)(_ns)?$|get[amc]time$")
PLACES = {
    "hpcdl/core/processes/wall.py:__init__ time.time": "the time of day that a run begins with",
    "hpcdl/core/processes/wall.py:set_by_s time.time": "how far the clock was set since: said, and no duration",
    "hpcdl/core/processes/lifeline.py:remove_abandoned time.time": "a file's age; whoever has it in memory keeps it",
    "hpcdl/core/processes/lifeline.py:remove_abandoned st_mtime": "a file's age; whoever has it in memory keeps it",
    "hpcdl/cluster/launchers/base.py:seconds_left time.time": "a moment that a job tells by the time of day alone",
    "hpcdl/cluster/batch/submission.py:submit_job time.time": "a stamp, by which jobs are sorted",
    "hpcdl/data/sources/base/source.py:add_files st_mtime_ns": "equal or not",
    "hpcdl/data/sources/base/source.py:note st_mtime_ns": "equal or not",
    "hpcdl/data/sources/layouts/folders.py:read_fields st_mtime_ns": "equal or not",
    "hpcdl/data/sources/layouts/folders.py:scan st_mtime_ns": "equal or not",
    "hpcdl/data/write/journal.py:source_state st_mtime_ns": "equal or not",
    "hpcdl/cluster/own_env.py:fingerprint st_mtime_ns": "equal or not",
    "hpcdl/cluster/supervise.py:_table_now st_mtime": "equal or not",
    "hpcdl/cluster/supervise.py:missed st_mtime_ns": "equal or not; since when is by the monotonic clock",
    "hpcdl/core/records/run_record.py:_look_at st_mtime": "whether a process is older than a lock without flock",
    "hpcdl/core/records/run_record.py:_silent_s st_mtime": "the silence of an hour on another host",
    "hpcdl/data/sources/layouts/flat.py:read st_mtime_ns": "equal or not",
    "hpcdl/data/sources/layouts/flat.py:stamp_of st_mtime_ns": "equal or not",
    "hpcdl/data/sources/image_folder.py:read st_mtime_ns": "equal or not",
    "hpcdl/doctor/scheduler.py:check_clocks time.time": "hosts' clocks are compared, unless one was set meanwhile",
    "hpcdl/strategies/base/graph.py:has_own_clock tf.timestamp": "whether TensorFlow has a clock here",
    "hpcdl/strategies/base/graph.py:timestamp tf.timestamp": "TensorFlow has no other; WALL.settled makes it the run's",
    "hpcdl/step/layers.py:_moment tf.timestamp": "TensorFlow has no other; WALL.settled makes it the run's",
    "hpcdl/study/sweep.py:_stamps st_mtime_ns": "equal or not",
    "hpcdl/trace/recorder.py:_sweep st_mtime": "a file's age, of a day and more; whoever lives keeps it locked",
    "hpcdl/run/listing.py:_listed time.time": "a checkpoint's age, which its files alone tell",
    "hpcdl/run/listing.py:_listed st_mtime": "a checkpoint's age, which its files alone tell",
    "hpcdl/scripts/fit/files.py:_facts st_mtime_ns": "equal or not",
    "hpcdl/run/ended.py:_write time.strftime": "a stamp",
    "hpcdl/run/ended.py:stamp_of st_mtime_ns": "equal or not",
    "hpcdl/faults/inject.py:_origin time.time": "the run's first start, for ranks of all hosts and starts",
    "hpcdl/faults/inject.py:_schedule time.time": "that start by this process's monotonic clock",
    "hpcdl/supervision/live.py:_newest_start st_mtime_ns": "which start is the newest, until ranks write there",
    "hpcdl/supervision/watchdog.py:_is_viewed st_mtime": "equal or not; since when is by the monotonic clock",
    "hpcdl/tuning/tune.py:_base_profile time.gmtime": "a stamp",
    "benchmarks/node_winner.py:sample time.time": "a stamp",
    "benchmarks/peers/__main__.py:head time.strftime": "a stamp",
}
"""Code that reads a settable clock, and why no duration depends on it: `FILE:FUNCTION WHAT`."""


def python_files() -> Iterator[Path]:
    """Yield the Python files of hpcdl, its scripts and benchmarks; scripts may have no suffix."""
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()):
        if path.suffix == ".py" or (not path.suffix and path.read_bytes()[:64].split(b"\n")[0].endswith(b"python3")):
            yield path


def readings(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the innermost function of each reading of a settable clock, and what it reads."""
    names = {
        (alias.asname or alias.name): f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime")
        for alias in node.names
    } | {
        (alias.asname or alias.name): alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in ("time", "datetime")
    }
    yield from _readings(tree, "", names)


def _readings(node: ast.AST, function: str, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
        what = _what(child, names)
        if what:
            yield inside, what
        if isinstance(child, ast.Call) and _name(child.func, names).startswith("time."):
            # A call with a time argument reads no clock; monotonic clocks cannot be set.
            given = {f"time.{name}": place for name, place in READS_AN_ARGUMENT.items()}
            name = _name(child.func, names)
            if len(child.args) > given.get(name, len(child.args)):
                for argument in child.args:
                    yield from _readings(ast.Expr(argument), inside, names)
                continue
            if name.startswith("time.clock_gettime") and not ast.unparse(child.args[0]).endswith("REALTIME"):
                continue
        yield from _readings(child, inside, names)


def _what(node: ast.AST, names: dict[str, str]) -> str:
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    if STAMPS.search(last):
        return last
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        return 'a difference of "at"' if any(_is_stamp(side) for side in (node.left, node.right)) else ""
    if not isinstance(node, ast.Attribute | ast.Name):
        return ""
    name = _name(node, names)
    room, _, last = name.rpartition(".")
    clock = room == "time" and last in READS | READS_AN_ARGUMENT.keys()
    day = room.startswith("datetime") and last in OF_DATETIME
    return name if clock or day or name in ("tf.timestamp", "tensorflow.timestamp") else ""


def _name(node: ast.AST, names: dict[str, str]) -> str:
    """Return the dotted name, such as `time.time`, however it was imported."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    return f"{_name(node.value, names)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def _is_stamp(node: ast.AST) -> bool:
    return re.search(r"""\[['"]at['"]\]$|\.get\(['"]at['"][^)]*\)$""", ast.unparse(node)) is not None


def test_who_reads_a_clock_that_may_be_set_is_known() -> None:
    """Durations use monotonic clocks: code that needs the time of day or of a file is in PLACES with its reason."""
    paths = [*python_files()]
    assert len(paths) > 300
    found = {
        f"{path.relative_to(ROOT)}:{function} {what}"
        for path in paths
        for function, what in readings(ast.parse(path.read_text()))
    }
    assert sorted(found - PLACES.keys()) == [], "take time.monotonic, or WALL of hpcdl/core/processes/wall.py"
    assert sorted(PLACES.keys() - found) == [], "gone: out of PLACES"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import time as t\ndef f(): return t.time() - 1", "time.time"),
        ("from time import time as now\ndef f(): return now()", "time.time"),
        ("from datetime import datetime\ndef f(): return datetime.now()", "datetime.datetime.now"),
        ("import datetime\ndef f(): return datetime.datetime.utcnow()", "datetime.datetime.utcnow"),
        ("import time\ndef f(): return time.clock_gettime(time.CLOCK_REALTIME)", "time.clock_gettime"),
        ("import os\ndef f(): return os.path.getmtime('x')", "getmtime"),
        ("def f(path): return path.stat().st_ctime_ns", "st_ctime_ns"),
        ("import time\ndef f(): return time.strftime('%S')", "time.strftime"),
        ("def f(a, b): return a['at'] - b.get('at', 0)", 'a difference of "at"'),
        ("import time\ndef f(at): return time.strftime('%S', time.localtime(at))", ""),
        ("import time\ndef f(): return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()", ""),
    ],
)
def test_the_search_finds(text: str, what: str) -> None:
    assert [*readings(ast.parse(text))] == ([("f", what)] if what else [])


def test_scripts_of_the_shell_count_no_time_of_day() -> None:
    """Shell scripts do not count by the time of day; only a job's stop time uses it, confirmed by the uptime."""
    shell = [
        path
        for room in (*ROOMS, "share")
        for path in (ROOT / room).rglob("*")
        if path.is_file() and path.read_bytes().startswith((b"#!/bin/bash", b"#!/bin/sh"))
    ]
    assert len(shell) > 10
    reads = re.compile(r"\bdate \+%s|\$\{?SECONDS\b|EPOCH(SECONDS|REALTIME)|printf .%\(%s")
    found = [line for path in shell for line in path.read_text().splitlines() if reads.search(line)]
    assert {*found} == {"export HPCDL_STOP_AT=$(($(date +%s) + @SECONDS@))"} and len(found) == 5


def test_a_shifted_clock_is_ahead() -> None:
    clock = WallClock()
    before = clock.now_s()
    clock.shift_s = 5.0
    assert clock.now_s() >= before + 5


@pytest.mark.parametrize("set_s", [30.0, -30.0, 0.01])
def test_a_clock_that_is_set_moves_no_time_of_a_run(set_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, real = WallClock(), time.time
    began, reported = clock.now_s(), -real()
    assert clock.set_by_s() == pytest.approx(0, abs=0.005)
    monkeypatch.setattr(time, "time", lambda: real() + set_s)
    told_later = -time.time()
    assert 0 <= clock.now_s() - began < 1 and clock.set_by_s() == pytest.approx(set_s, abs=0.005)
    assert clock.settled(told_later, began) == pytest.approx(clock.now_s(), abs=0.5)
    if abs(set_s) > 1:  # noted before the clock was set by that step
        assert clock.settled(reported, began) == pytest.approx(began, abs=0.5)
    assert clock.settled(began, 0.0) == began
