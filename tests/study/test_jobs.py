"""A study as batch jobs: what is submitted, what is not submitted twice, and how a time limit ends a sweep."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcdl.cluster.batch.systems import NodeWishes
from hpcdl.config.study import load_study, study_tables
from hpcdl.core.errors import HpcdlError, StoppedEarly, UsageError
from hpcdl.core.storage.files import write_toml
from hpcdl.study.jobs import STUDY_FILE, JobLimits, find_allocation, part_folder, submit_parts
from hpcdl.study.plan import make_plan
from hpcdl.study.state import digest_of, new_state, open_study, write_state
from hpcdl.study.sweep import Sweep
from tests.conftest import ROOT, patience
from tests.study.studies import behave, small_study, sweep, told

LIMITS = JobLimits(time_s=1800.0, partition="normal", nodes_wanted=NodeWishes(qos="long"))


class Queue:
    """Fake Slurm commands: number jobs from 101 and answer with the states in `states`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.states: dict[str, str] = {}
        folder.mkdir()
        (folder / "jobs").mkdir()
        self.program("sbatch", f'n=$((101 + $(ls {folder}/jobs | wc -l))); cp "${{@: -1}}" {folder}/jobs/$n; echo $n')
        self.program("squeue", f"for word; do case $prev in --jobs) cat {folder}/$word;; esac; prev=$word; done")
        self.program("sacct", "exit 1")
        self.program("srun", "exit 1")

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def says(self, **states: str) -> None:
        for number, state in states.items():
            (self.folder / number.removeprefix("job")).write_text(f"{state}\n")

    @property
    def scripts(self) -> list[str]:
        return [path.read_text() for path in sorted((self.folder / "jobs").iterdir())]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Queue:
    found = Queue(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{found.folder}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def finish(folder: Path, nodes: int, **flags: Any) -> None:
    """Write the part of `nodes` nodes as a job leaves it after running all its runs."""
    study, plan = small_study(**flags)
    state = new_state(study, plan.only_nodes(nodes))
    for run in state.runs:
        state = state.changed(run.name, status="finished")
    own = part_folder(folder, nodes)
    own.mkdir(parents=True)
    write_state(own, state)


def test_one_job_for_each_number_of_nodes(queue: Queue, tmp_path: Path) -> None:
    study, plan = small_study(workers="1,2,4", ranks_per_node=2, strategy="ring,ps")
    parts = submit_parts(tmp_path / "out", study, plan, LIMITS, resume=False)
    assert [(part.nodes, part.runs, part.job) for part in parts] == [(1, 6, "101"), (2, 4, "102"), (3, 2, "103")]
    for part, script in zip(parts, queue.scripts, strict=True):
        assert f"#SBATCH --nodes={part.nodes}\n#SBATCH --ntasks-per-node=2" in script
        assert (
            "--partition=normal" in script
            and "--qos=long" in script
            and "--time=30" in script
            and "until_done=yes" in script
        )
        assert f"sweep {tmp_path}/out/study.toml --only-nodes {part.nodes} --out {part.folder} --resume" in script


def test_what_the_jobs_read_is_the_same_study(tmp_path: Path) -> None:
    """Jobs read the same study from their file, for every study of the gallery, with flags and the small version."""
    files = sorted((ROOT / "share" / "hpcdl" / "studies").glob("*.toml"))
    assert len(files) > 6
    for path in [*files, None]:
        flags = {"retries": "3", "run-timeout": "90s"}
        own = {**flags, "model": "lenet", "data": "a b,c", "workers": "1,2"} if path is None else flags
        small = path is not None and "[small]" in path.read_text()
        study = load_study(path, own, ["seed=7"], small=small)
        write_toml(tmp_path / STUDY_FILE, study_tables(study))
        again = load_study(tmp_path / STUDY_FILE, {})
        assert (again.name, again.plan.retries, again.plan.run_timeout) == (study.name, 3, 90.0)
        assert digest_of(again, make_plan(again)) == digest_of(study, make_plan(study))


def test_resume_submits_what_is_left_and_has_no_job(queue: Queue, tmp_path: Path) -> None:
    flags = {"workers": "1,2,3,4", "ranks_per_node": 1}
    study, plan = small_study(**flags)
    folder = tmp_path / "out"
    submit_parts(folder, study, plan, LIMITS, resume=False)
    with pytest.raises(UsageError, match="--resume"):
        submit_parts(folder, study, plan, LIMITS, resume=False)
    finish(folder, 1, **flags)
    queue.says(job101="COMPLETED", job102="RUNNING", job103="PENDING", job104="FAILED")
    parts = submit_parts(folder, study, plan, LIMITS, resume=True)
    assert [(part.nodes, part.state, part.submitted) for part in parts] == [
        (1, "finished", False), (2, "running", False), (3, "pending", False), (4, "pending", True),
    ]  # fmt: skip
    assert parts[3].job == "105" and len(queue.scripts) == 5
    queue.says(job105="PENDING")
    assert not any(part.submitted for part in submit_parts(folder, study, plan, LIMITS, resume=True))


def test_resume_takes_more_repeats(queue: Queue, tmp_path: Path) -> None:
    """As without --jobs; a part that had finished gets another job, one in the queue reads them as it starts."""
    flags = {"workers": "1,2", "ranks_per_node": 1}
    folder = tmp_path / "out"
    submit_parts(folder, *small_study(**flags), LIMITS, resume=False)
    finish(folder, 1, **flags)
    queue.says(job101="COMPLETED", job102="PENDING")
    for _ in range(2):
        parts = submit_parts(folder, *small_study(**flags, repeats=5), LIMITS, resume=True)
        assert [(part.runs, part.finished, part.job) for part in parts] == [(5, 2, "103"), (5, 0, "102")]
        queue.says(job103="PENDING")
    assert load_study(folder / STUDY_FILE, {}).plan.repeats == 5
    with pytest.raises(UsageError, match="more repeats"):
        submit_parts(folder, *small_study(**flags, repeats=4), LIMITS, resume=True)


def test_another_study_or_folder_is_refused(queue: Queue, tmp_path: Path) -> None:
    study, plan = small_study()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").touch()
    with pytest.raises(UsageError, match="holds no study of jobs"):
        submit_parts(tmp_path / "thesis", study, plan, LIMITS, resume=True)
    submit_parts(tmp_path / "out", study, plan, LIMITS, resume=False)
    with pytest.raises(UsageError, match="another matrix"):
        submit_parts(tmp_path / "out", *small_study(batch_size="16"), LIMITS, resume=True)
    with pytest.raises(UsageError, match="no point of the study needs 9 nodes; its points need 1"):
        plan.only_nodes(9)
    assert len(queue.scripts) == 1


def test_without_a_batch_system_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="neither sbatch nor qsub"):
        submit_parts(tmp_path / "out", *small_study(), LIMITS, resume=False)
    assert not (tmp_path / "out").exists()


def test_a_submission_that_fails_keeps_the_jobs_before_it(queue: Queue, tmp_path: Path) -> None:
    study, plan = small_study(workers="1,2", ranks_per_node=1)
    sbatch = (queue.folder / "sbatch").read_text()
    queue.program("sbatch", f"test ! -e {queue.folder}/jobs/101 || exit 1\n{sbatch}")
    with pytest.raises(HpcdlError, match="sbatch"):
        submit_parts(tmp_path / "out", study, plan, LIMITS, resume=False)
    kept = json.loads((tmp_path / "out" / "jobs.json").read_text())["jobs"]
    assert [(job["nodes"], job["number"]) for job in kept] == [(1, "101")]


def test_other_launchers_give_a_run_the_whole_job(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    allocation = find_allocation({"HPCDL_HOSTFILE": str(tmp_path / "hosts")}, [2])
    assert not allocation.nodes_variable and list(allocation.nodes) == ["a", "b"]
    with pytest.raises(UsageError, match="--only-nodes 2"):
        find_allocation({"HPCDL_HOSTFILE": str(tmp_path / "hosts")}, [1, 2])


def limited(tmp_path: Path, stop_after_s: float, **behaviour: Any) -> tuple[Callable[[], Any], Path]:
    study, plan = small_study()
    allocation = behave(tmp_path / "fake", **behaviour)
    state = open_study(tmp_path / "study", study, plan, resume=False)
    return Sweep(tmp_path / "study", study, plan, state, allocation, stop_after_s=stop_after_s).run, tmp_path / "fake"


@pytest.mark.long
def test_the_time_limit_of_the_job_ends_the_sweep_with_75(tmp_path: Path) -> None:
    run, fake = limited(tmp_path, patience(3), seconds=60)  # the fake's Python has to start before the limit
    with pytest.raises(StoppedEarly, match="4 of 4 runs to go"):
        run()
    assert len(told(fake)) == 1


def test_a_run_that_the_batch_system_stops_has_not_failed(tmp_path: Path) -> None:
    """Runs stopped by the batch system have not failed: Slurm warns the ranks early, which exit with 75."""
    run, fake = limited(tmp_path, 60.0, **{"run_001-ring-1w-8b-r1": ["stopped"], "run_002-ring-2w-8b-r1": ["stopped"]})
    with pytest.raises(StoppedEarly, match="of 4 runs to go"):
        run()
    assert len(told(fake)) == 1
    state = sweep(tmp_path / "study", behave(tmp_path / "fake"), *small_study(), resume=True)
    assert state.count("finished") == 4 and not any(item.attempts for item in state.runs)
    assert not list((tmp_path / "study" / "failed").iterdir())


def test_a_run_that_leaves_by_itself_with_75_has_failed(tmp_path: Path) -> None:
    study, plan = small_study(workers="1", repeats=1, retries=0)
    allocation = behave(tmp_path / "fake", **{f"run_{plan.runs[0].name}": ["stopped"]})
    assert sweep(tmp_path / "study", allocation, study, plan).runs[0].status == "failed"


def test_the_command_says_what_it_submits(queue: Queue, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hpcdl.cli.main import run

    flags = ["--model", "lenet", "--data", "synthetic:mnist", "--workers", "1,2", "--ranks-per-node", "1"]
    line = ["sweep", *flags, "--jobs", "--out", str(tmp_path / "out")]
    assert run([*line, "--dry-run"]) == 0
    assert "as jobs (--jobs), one for each number of nodes: 1 x 3 runs, 2 x 3 runs" in capsys.readouterr().out
    assert not queue.scripts
    assert run([*line, "--time", "soon"]) == 2 and "--time" in capsys.readouterr().err
    assert run(line) == 0
    shown = capsys.readouterr()
    assert [row.split() for row in shown.out.splitlines()[1:]] == [
        ["1", "3", "0", "0", "101", "pending"], ["2", "3", "0", "0", "102", "pending"],
    ]  # fmt: skip
    assert "next: hpcdl jobs" in shown.err
    queue.says(job101="PENDING", job102="RUNNING")
    assert run([*line, "--resume", "--json"]) == 0
    assert [part["state"] for part in json.loads(capsys.readouterr().out)["jobs"]] == ["pending", "running"]
    assert sys.executable in queue.scripts[0]
