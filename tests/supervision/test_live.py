"""The live view of a run: ranks answer only while a viewer is connected; threads, no ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcdl.cli.training.watch import BAR, bar, lines
from hpcdl.comm.observed import RankMonitor
from hpcdl.core.errors import UsageError
from hpcdl.core.records.run_record import write_record
from hpcdl.core.storage.lock import writing
from hpcdl.supervision.live import LiveView, RunNow
from hpcdl.supervision.watchdog import Actions, Limits, Watchdog, watching
from tests.conftest import CommandLine, patience
from tests.report.synthetic import make_record


def until(view: LiveView, holds: Callable[[RunNow], bool]) -> RunNow:
    deadline_s = time.monotonic() + patience(20)
    while not holds(now := view.look()):
        assert time.monotonic() < deadline_s, now
        time.sleep(0.05)
    return now


def journal(run: Path, *events: dict[str, object]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def test_ranks_answer_while_somebody_looks_on(tmp_path: Path) -> None:
    seen = [RankMonitor(rank, 2, f"host{rank}") for rank in range(2)]
    folder = tmp_path / "ranks" / "watch" / "word"
    actions = Actions(end=lambda error: pytest.fail(str(error)))
    watches = [
        Watchdog(monitor=one, folder=folder, actions=actions, limits=Limits(stall_s=patience(2))) for one in seen
    ]
    with writing(tmp_path), watching(watches[0]), watching(watches[1]):
        journal(tmp_path, {"kind": "start", "steps": 100, "done": 0, "counted": "samples", "at": 10.0})
        time.sleep(0.5)
        assert not folder.exists(), "nobody looks on, and yet there are notes"
        view = LiveView(tmp_path)
        until(view, lambda now: now.num_ranks == 2)
        seen[0].doing("computing", 7)
        for _ in range(8):
            seen[0].step_over((0.0, 0.0, 3.0, 4.0, 4.0, 4.0))
        journal(tmp_path, {"kind": "step", "step": 20, "loss": 0.5, "images_per_second": 64.0, "at": 30.0})
        now = until(view, lambda now: any(one.shares for one in now.ranks))
        assert (now.status, now.step, now.num_steps, now.loss, now.seconds_left) == ("starting", 20, 100, 0.5, 80.0)
        fast = next(one for one in now.ranks if one.note.rank == 0)
        assert fast.shares == pytest.approx([0, 0.75, 0.25, 0, 0]) and fast.steps_per_second
        reported = "\n".join(lines(now))
        assert (
            "step 20 of 100  64 samples/s" in reported
            and "computing, step 7" in reported
            and "c" * 18 + "x" * 6 in reported
        )
        with seen[1].waiting_for("receiving", [0]):
            until(view, lambda now: any(one.note.waits for one in now.ranks))
        view.close()
        assert not (folder.parent / "viewed").exists()
    now = LiveView(tmp_path).look()
    assert (now.status, now.ranks, now.step, now.seconds_left) == ("lost", [], 20, None)
    write_record(tmp_path, make_record(status="finished", steps=100))
    now = LiveView(tmp_path).look()
    assert (now.status, now.step, now.seconds_left) == ("finished", 100, None)


def test_a_bar_is_always_as_long() -> None:
    for shares in ([0.2] * 5, [1.0, 0, 0, 0, 0], [0.33, 0.33, 0.34, 0, 0]):
        assert len(bar(shares)) == BAR
    assert bar([]) == ""


@pytest.mark.parametrize("held", [(), ("manifest.json", ".hpcdl-lock")], ids=["empty", "a data set"])
def test_a_folder_that_is_no_run_is_refused_and_gets_no_note(held: tuple[str, ...], tmp_path: Path) -> None:
    for name in held:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="is not a run directory: it holds none of "):
        LiveView(tmp_path).look()
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(held)


def test_the_command_ends_with_the_run(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a run directory"):
        LiveView(tmp_path / "nowhere")
    (tmp_path / "run").mkdir()
    journal(
        tmp_path / "run", {"kind": "start", "steps": 9, "done": 0, "at": 1.0}, {"kind": "step", "step": 9, "at": 2.0}
    )
    reported = run_hpcdl(["watch", tmp_path / "run"])
    assert reported.code == 0 and reported.out.startswith("lost  step 9 of 9"), reported.err


def test_a_finished_run_shows_its_last_loss(run_hpcdl: CommandLine, tmp_path: Path) -> None:
    """The journal notes steps twice a second: of a run of six it may hold the first alone."""
    (tmp_path / "run").mkdir()
    journal(tmp_path / "run", {"kind": "start", "steps": 6, "done": 0, "at": 1.0})
    journal(tmp_path / "run", {"kind": "step", "step": 1, "at": 2.0, "loss": 2.3, "images_per_second": 100.0})
    write_record(tmp_path / "run", make_record(status="finished", steps=6, loss=0.25, images_per_second=800.0))
    assert run_hpcdl(["watch", tmp_path / "run"]).out == "finished  step 6 of 6  800 images/s  loss 0.2500\n"
