from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError
from hpcdl.core.records.run_record import read_record, write_record
from hpcdl.study.state import open_study, read_state
from hpcdl.study.sweep import raise_for
from tests.conftest import ROOT, patience
from tests.study.studies import behave, small_study, sweep, told


def finished_names(folder: Path) -> set[str]:
    return {run.name for run in read_state(folder).runs if run.status == "finished"}


def test_every_run_is_kept_and_knows_its_study(tmp_path: Path) -> None:
    study, plan = small_study(name="speed", strategy="ring,ps")
    allocation = behave(tmp_path / "fake")
    state = sweep(tmp_path / "study", allocation, study, plan)
    assert state.count("finished") == len(plan.runs) == 8
    assert [item["run"] for item in told(tmp_path / "fake")] == [run.name for run in plan.runs], "in the plan's order"
    for run in plan.runs:
        run_dir = tmp_path / "study" / "runs" / run.name
        record = read_record(run_dir)
        assert (record.study, record.mode, record.repeat) == ("speed", "weak", run.repeat)
        assert record.images_per_second and record.status == "finished"
        assert not (run_dir / "model.keras").exists() and not (run_dir / "checkpoints").exists()
    seeds = {(item["run"][-2:], item["flags"]["--seed"]) for item in told(tmp_path / "fake")}
    assert seeds == {("r1", "0"), ("r2", "1")}, "repeats differ in their seed, points do not"


def test_models_stay_where_that_is_wanted(tmp_path: Path) -> None:
    study, plan = small_study(workers="1", repeats=1, keep_models=True)
    sweep(tmp_path / "study", behave(tmp_path / "fake"), study, plan)
    assert (tmp_path / "study" / "runs" / plan.runs[0].name / "model.keras").exists()


def test_a_failed_run_is_tried_again_then_reported(tmp_path: Path) -> None:
    study, plan = small_study(retries=1)
    bad, once = "001-ring-1w-8b-r1", "002-ring-2w-8b-r2"
    allocation = behave(tmp_path / "fake", **{f"run_{bad}": ["fail", "crash"], f"run_{once}": ["silent"]})
    folder = tmp_path / "study"
    state = sweep(folder, allocation, study, plan)
    assert state.count("finished") == 3 and state.run(bad).status == "failed"
    assert (state.run(bad).attempts, state.run(once).attempts) == (2, 1)
    assert "signal 9" in state.run(bad).message and "without a finished record" in state.run(once).message
    record = read_record(folder / "runs" / bad)
    assert record.status == "failed" and record.study and record.repeat == 1
    first = read_record(folder / "failed" / f"{bad}.1")
    assert first.status == "failed" and first.message == "exit code 1: rank 1 on c401: out of memory"
    assert read_record(folder / "failed" / f"{once}.1").workers == 2, "a run that left no record gets one"
    with pytest.raises(HpcdlError, match=f"1 of 4 runs failed; {bad}: killed by signal 9") as caught:
        raise_for(state, folder)
    assert caught.value.exit_code == 1 and str(caught.value).endswith("try them again with --resume")
    again = sweep(folder, allocation, study, plan, resume=True)
    assert again.count("finished") == 4, "a failed run gets another chance with --resume"
    assert len(told(tmp_path / "fake")) == 4 + 2 + 1, "and nothing else is run again"


def test_a_run_that_the_ranks_refused_is_not_called_removed(tmp_path: Path) -> None:
    """`train` removes the folder that it had made; a sweep keeps one with the reason, and does not ask again."""
    study, plan = small_study(workers="1", repeats=1, retries=1)
    name = plan.runs[0].name
    allocation = behave(tmp_path / "fake", **{f"run_{name}": ["refuse"]})
    state = sweep(tmp_path / "out", allocation, study, plan)
    assert state.run(name).message == "exit code 2: no loss of that name"
    assert len(told(tmp_path / "fake")) == 1
    assert read_record(tmp_path / "out" / "runs" / name).message == state.run(name).message


def test_a_run_whose_numbers_are_not_finite_is_not_started_again(tmp_path: Path) -> None:
    """A diverged run is not retried, as seed and settings stay the same; only --resume starts it again."""
    study, plan = small_study(workers="1", repeats=2, retries=1)
    bad, unlucky = "001-ring-1w-8b-r1", "001-ring-1w-8b-r2"
    allocation = behave(tmp_path / "fake", **{f"run_{bad}": ["diverge"], f"run_{unlucky}": ["fail"]})
    folder, lines = tmp_path / "study", list[str]()
    state = sweep(folder, allocation, study, plan, notify=lambda news: lines.append(news.line))
    assert [item["run"] for item in told(tmp_path / "fake")] == [bad, unlucky, unlucky]
    assert (state.run(bad).status, state.run(bad).attempts) == ("failed", 1)
    assert "a/kernel is not finite at step 3" in state.run(bad).message
    reported = [line for line in lines if line.startswith(f"{bad} failed")]
    assert len(reported) == 1 and reported[0].endswith(
        "it is not started again, its seed and settings would be the same"
    )
    record = read_record(folder / "runs" / bad)
    assert (record.status, record.failure) == ("failed", "not-finite") and "a/kernel" in record.message
    with pytest.raises(HpcdlError, match=f"1 of 2 runs failed; {bad}: exit code 1: the gradient") as caught:
        raise_for(state, folder)
    assert "--resume" not in str(caught.value) and str(caught.value).endswith("and choose another --out DIR")
    assert sweep(folder, allocation, study, plan, resume=True).count("finished") == 2


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    study, plan = small_study(workers="1", repeats=1, retries=0, run_timeout="1s")
    allocation = behave(tmp_path / "fake", **{f"run_{plan.runs[0].name}": ["hang"]})
    state = sweep(tmp_path / "study", allocation, study, plan)
    assert state.runs[0].status == "failed" and "--run-timeout" in state.runs[0].message


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "tests.study.studies", str(folder), *arguments]
    return subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for_starts(folder: Path, num: int) -> None:
    deadline = time.monotonic() + patience(60)
    while len(told(folder)) < num:
        assert time.monotonic() < deadline, told(folder)
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_killed_sweep_continues_and_repeats_nothing_that_finished(tmp_path: Path) -> None:
    behave(tmp_path, seconds=0.2)
    folder = tmp_path / "study"
    kept: set[str] = set()
    num_started = 0
    for turn, arguments in enumerate(((), ("--resume",), ("--resume",)), start=1):
        process = started(tmp_path, *arguments)
        wait_for_starts(tmp_path, 2 * turn)
        process.kill()
        process.communicate()
        now = finished_names(folder)
        assert kept <= now
        kept, num_started = now, len(told(tmp_path))
    orphans = [item["pid"] for item in told(tmp_path) if alive(item["pid"])]
    last = started(tmp_path, "--resume")
    _, err = last.communicate(timeout=300)
    assert last.returncode == 0, err
    assert not any(map(alive, orphans)), "a run whose sweep was killed does not disturb those of the next"
    starts = [item["run"] for item in told(tmp_path)]
    assert len(finished_names(folder)) == 6 == len(set(starts))
    assert not kept & set(starts[num_started:]), "what had finished before the last kill is not run again"
    assert len(starts) <= 6 + 3, "each kill costs one run at most"


@pytest.mark.long
def test_a_run_that_ended_while_nobody_looked_is_kept(tmp_path: Path) -> None:
    allocation = behave(tmp_path, seconds=0.3)
    process = started(tmp_path)
    wait_for_starts(tmp_path, 1)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + patience(30)
    while not told(tmp_path, "end"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    study, plan = small_study(repeats=3)
    state = sweep(tmp_path / "study", allocation, study, plan, resume=True)
    assert state.count("finished") == 6 == len(told(tmp_path))
    record = read_record(tmp_path / "study" / "runs" / plan.runs[0].name)
    assert record.study == study.name
    assert state.run(plan.runs[0].name).seconds == 20.0, "with its start, not its training alone"


@pytest.mark.long
@pytest.mark.parametrize("damage", ["gone", "damaged"])
def test_a_finished_run_without_its_record_is_run_again_and_reported(tmp_path: Path, damage: str) -> None:
    study, plan = small_study()
    allocation, folder = behave(tmp_path / "fake"), tmp_path / "study"
    sweep(folder, allocation, study, plan)
    lost = plan.runs[1].name
    if damage == "gone":
        shutil.rmtree(folder / "runs" / lost)
    else:
        (folder / "runs" / lost / "record.json").write_text('{"schema": ')
    assert open_study(folder, study, plan, resume=True).run(lost).status == "waiting", "a dry run says so too"
    lines: list[str] = []
    state = sweep(folder, allocation, study, plan, resume=True, notify=lambda news: lines.append(news.line))
    assert state.count("finished") == 4 and state.run(lost).message == ""
    assert [item["run"] for item in told(tmp_path / "fake")] == [*(run.name for run in plan.runs), lost]
    assert read_record(folder / "runs" / lost).status == "finished"
    assert f"{lost} is run again: it had finished, but its record is missing or damaged" in lines


@pytest.mark.long
def test_what_killed_ranks_have_recorded_does_not_stay_on_the_node(tmp_path: Path) -> None:
    """After a kill, the restarted run removes from the node what the old ranks recorded."""
    behave(tmp_path, seconds=30)
    process = started(tmp_path)
    wait_for_starts(tmp_path, 1)
    process.kill()
    process.communicate()
    study, plan = small_study(repeats=3)
    trace = tmp_path / "study" / "runs" / plan.runs[0].name / "trace"
    recorded = tmp_path / f"hpcdl-trace-{os.geteuid()}-0123456789abcdef" / "rank-0.trace"
    for folder in (trace, recorded.parent):
        folder.mkdir(mode=0o700, parents=True)
    recorded.write_bytes(b"of a rank that is gone")
    (trace / "rank-0.place").write_text(f"{os.uname().nodename}\n{recorded}\n")
    sweep(tmp_path / "study", behave(tmp_path, seconds=0.05), study, plan, resume=True)
    assert not recorded.parent.exists()


@pytest.mark.long
def test_ranks_that_still_save_on_another_node_are_waited_for(tmp_path: Path) -> None:
    behave(tmp_path, seconds=30)
    process = started(tmp_path)
    wait_for_starts(tmp_path, 1)
    process.kill()
    process.communicate()
    allocation = dataclasses.replace(behave(tmp_path, seconds=0.05), settle_s=patience(0.6))
    study, plan = small_study(repeats=3)
    run_dir = tmp_path / "study" / "runs" / plan.runs[0].name
    run_dir.mkdir(exist_ok=True)
    written: list[float] = []

    def save() -> None:
        for number in range(5):
            (run_dir / f"late-{number}").touch()
            written.append(time.time())
            time.sleep(0.3)

    rank = threading.Thread(target=save)
    rank.start()
    sweep(tmp_path / "study", allocation, study, plan, resume=True)
    rank.join()
    assert len(written) == 5 and told(tmp_path)[1]["at"] > written[-1]
    assert not list(run_dir.glob("late-*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_with_75_and_leaves_nothing_running(tmp_path: Path, number: int) -> None:
    behave(tmp_path, seconds=30)
    process = started(tmp_path)
    wait_for_starts(tmp_path, 1)
    os.kill(process.pid, number)
    _, err = process.communicate(timeout=300)
    assert process.returncode == StoppedEarly.exit_code
    assert "continue with --resume" in err
    assert not any(alive(item["pid"]) for item in told(tmp_path))
    assert read_state(tmp_path / "study").count("finished") == 0


def test_runs_go_side_by_side_on_nodes_of_their_own(tmp_path: Path) -> None:
    study, plan = small_study(workers="1,2,3", ranks_per_node=1, repeats=2)
    fake = behave(tmp_path / "fake", seconds=0.3)
    allocation = dataclasses.replace(fake, nodes=("c1", "c2", "c3"))
    sweep(tmp_path / "study", allocation, study, plan)
    sizes = {run.name: run.point.nodes for run in plan.runs}
    begun = {item["run"]: item["at"] for item in told(tmp_path / "fake")}
    ended = {item["run"]: item["at"] for item in told(tmp_path / "fake", "end")}
    most = max(sum(sizes[name] for name in begun if begun[name] <= at < ended[name]) for at in begun.values())
    assert most == 3, "never more nodes than there are, and not one run after the other"


def test_a_study_that_needs_more_nodes_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    study, plan = small_study(workers="1,2", ranks_per_node=1)
    with pytest.raises(UsageError, match="1 of 2 points need more than the 1 nodes here, up to 2; ask for 2 nodes"):
        sweep(tmp_path / "study", behave(tmp_path / "fake"), study, plan)
    assert not (tmp_path / "study").exists()


def test_another_study_in_the_folder_is_refused(tmp_path: Path) -> None:
    study, plan = small_study(workers="1", repeats=1)
    allocation = behave(tmp_path / "fake")
    sweep(tmp_path / "study", allocation, study, plan)
    with pytest.raises(UsageError, match="--resume"):
        sweep(tmp_path / "study", allocation, study, plan)
    other = small_study(workers="1", repeats=1, batch_size="16")
    with pytest.raises(UsageError, match="another matrix"):
        sweep(tmp_path / "study", allocation, *other, resume=True)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(UsageError, match="holds no study"):
        sweep(tmp_path / "thesis", allocation, study, plan)
    assert len(told(tmp_path / "fake")) == 1


def test_resume_adds_repeats_and_keeps_the_earlier_runs(tmp_path: Path) -> None:
    allocation, folder = behave(tmp_path / "fake"), tmp_path / "study"
    sweep(folder, allocation, *small_study(workers="1,2", repeats=1))
    state = sweep(folder, allocation, *small_study(workers="1,2", repeats=3), resume=True)
    assert state.count("finished") == 6 and len(told(tmp_path / "fake")) == 6
    assert read_record(folder / "runs" / state.runs[-1].name).repeat == 3
    with pytest.raises(UsageError, match="more repeats"):
        sweep(folder, allocation, *small_study(workers="1,2", repeats=2), resume=True)


def test_a_sweep_begins_in_what_a_call_without_room_for_its_first_file_left(tmp_path: Path) -> None:
    study, plan = small_study(workers="1", repeats=1)
    for name in ("runs", "logs", "failed"):
        (tmp_path / "study" / name).mkdir(parents=True)
    sweep(tmp_path / "study", behave(tmp_path / "fake"), study, plan)
    assert len(told(tmp_path / "fake")) == 1
    (tmp_path / "theirs" / "runs").mkdir(parents=True)
    for name in ("runs/of-the-marathon.csv", "train.toml", "logs"):
        (tmp_path / "theirs" / name).touch()
        with pytest.raises(UsageError, match="holds no study"):
            sweep(tmp_path / "theirs", behave(tmp_path / "fake"), study, plan)
        (tmp_path / "theirs" / name).unlink()


def test_data_that_changed_under_one_name_is_not_mixed_with_what_was(tmp_path: Path, shards: Path) -> None:
    study, plan = small_study(repeats=1, retries=0)
    allocation = behave(tmp_path / "fake", run_002_ring_2w_8b_r1=["fail"])
    folder = tmp_path / "study"
    sweep(folder, allocation, study, plan)
    done = folder / "runs" / "001-ring-1w-8b-r1"
    record = read_record(done)
    write_record(done, dataclasses.replace(record, config={**record.config, "data": str(shards)}, data_checksum="old"))
    with pytest.raises(UsageError, match="holds other data than when runs in"):
        sweep(folder, allocation, study, plan, resume=True)
    write_record(done, dataclasses.replace(record, config={**record.config, "data": str(tmp_path)}))
    assert sweep(folder, allocation, study, plan, resume=True).count("finished") == 2
