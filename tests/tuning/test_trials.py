from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpcdl.cluster.processes import marked
from hpcdl.node.machines import read_machine
from hpcdl.node.plan import launch_plan
from hpcdl.node.profile import Settings, find_profile
from hpcdl.tuning import trials
from hpcdl.tuning.space import Candidate
from hpcdl.tuning.trials import (
    MARK,
    Measurer,
    TrialOutcome,
    Workload,
    bench_step_command,
    node_of,
    shed,
    trial_prefixes,
)
from tests.conftest import patience

if TYPE_CHECKING:
    from tests.lab.slurm import SlurmLab

TOPOLOGY = read_machine("generic").topology
SETTINGS = Settings(ranks_per_node=2, intra_op_threads=8, inter_op_threads=2, onednn=False)
CANDIDATE = Candidate(settings=SETTINGS, plan=launch_plan(TOPOLOGY, SETTINGS, 2, 2, openmp=False))
GOOD = json.dumps({"step_seconds": 0.5, "loss": 2.3, "peak_memory_bytes": 1000})


def python(code: str) -> Callable[[Workload, Settings, Path], Sequence[str]]:
    """Return a command that runs `code` in place of `hpcdl bench step`; argv[1] is the profile."""
    return lambda workload, settings, profile: [sys.executable, "-c", code, str(profile)]


def measure(code: str, limit_s: float = 30.0, prefix: Sequence[str] = ()) -> TrialOutcome:
    workload = Workload(model="lenet", batch_size=16)
    measurer = Measurer(workload=workload, topology=TOPOLOGY, command_of=python(code))
    return measurer.measure(CANDIDATE, limit_s, prefix)


def test_a_good_trial() -> None:
    outcome = measure(f"print('''{GOOD}''')")
    assert (outcome.status, outcome.images_per_second, outcome.loss) == ("ok", 2 * 16 / 0.5, 2.3)
    assert outcome.memory_bytes_per_rank == 1000
    assert outcome.seconds > 0 and outcome.counted == "images"


@pytest.mark.parametrize(
    ("accelerators", "status"), [({}, "failed"), ({"NVIDIA H200": 1}, "failed"), ({"NVIDIA H200": 2}, "ok")]
)
def test_with_gpus_every_rank_must_have_computed_on_one(accelerators: dict[str, int], status: str) -> None:
    reported = json.dumps(json.loads(GOOD) | {"accelerators": accelerators})
    node = dataclasses.replace(TOPOLOGY, devices={"NVIDIA H200": 2})
    measurer = Measurer(
        workload=Workload(model="lenet", batch_size=16), topology=node, command_of=python(f"print({reported!r})")
    )
    outcome = measurer.measure(CANDIDATE, 30)
    assert outcome.status == status and (outcome.images_per_second is not None) == (status == "ok")
    assert status == "ok" or "of 2 ranks computed on CPUs" in outcome.message


def test_what_a_trial_counts_is_what_it_says() -> None:
    rows = json.dumps(json.loads(GOOD) | {"counted": "samples"})
    assert measure(f"print('''{rows}''')").counted == "samples"


def test_the_settings_reach_the_trial_as_a_profile(tmp_path: Path) -> None:
    copy = tmp_path / "seen.toml"
    outcome = measure(f"import shutil, sys; shutil.copy(sys.argv[1], {str(copy)!r}); print('''{GOOD}''')")
    assert outcome.status == "ok"
    found = find_profile(str(copy), "lenet", TOPOLOGY)
    assert found is not None
    assert found.settings == SETTINGS


def test_the_batch_of_the_candidate_counts() -> None:
    settings = Settings(ranks_per_node=1, batch_size=64)
    candidate = Candidate(settings=settings, plan=launch_plan(TOPOLOGY, settings, 1, 1, openmp=False))
    workload = Workload(model="lenet", batch_size=16)
    measurer = Measurer(workload=workload, topology=TOPOLOGY, command_of=python(f"print('''{GOOD}''')"))
    assert measurer.measure(candidate, 30).images_per_second == 128
    words = bench_step_command(workload, settings, Path("p.toml"))
    assert words[words.index("--batch-size") + 1] == "64"
    assert words[words.index("--strategy") + 1] == "single"
    assert words[words.index("--profile") + 1] == "p.toml"


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import sys; print('warming up'); print('hpcdl: no', file=sys.stderr); sys.exit(1)", "failed", "code 1: no"),
        ("import os; os.abort()", "failed", "killed by signal 6"),
        ("import os; os.kill(os.getpid(), 9)", "failed", "perhaps out of memory"),
        ("print('Hello')", "garbage", "JSONDecodeError"),
        ("", "garbage", "JSONDecodeError"),
        ("print('[1, 2]')", "garbage", "TypeError"),
        ("print('{}')", "garbage", "KeyError"),
        ('print(\'{"step_seconds": "fast"}\')', "garbage", "ValueError"),
        ("print('{\"step_seconds\": NaN}')", "garbage", "ValueError"),
        ("print('{\"step_seconds\": -1}')", "garbage", "ValueError"),
        ("import sys; sys.stdout.buffer.write(b'\\xff' * 3_000_000)", "garbage", "UnicodeDecodeError"),
    ],
)
def test_bad_trials_are_distinguished(code: str, status: str, words: str) -> None:
    outcome = measure(code)
    assert (outcome.status, outcome.images_per_second) == (status, None)
    assert words in outcome.message


def test_real_memory_exhaustion() -> None:
    code = "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)); bytearray(2 << 30)"
    outcome = measure(code)
    assert outcome.status == "failed"
    assert "MemoryError" in outcome.message


def test_a_program_that_is_not_there() -> None:
    outcome = measure("", prefix=["/nonexistent/launcher"])
    assert outcome.status == "failed"
    assert "No such file" in outcome.message


HANG = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open({ready!r}, "w").write(os.environ["HPCDL_TRIAL"])
time.sleep(600)
"""


@pytest.mark.long
def test_a_hanging_trial_is_killed_with_everything_it_started(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    begin = time.monotonic()
    outcome = measure(HANG.format(ready=str(ready)), limit_s=patience(3.0))
    assert outcome.status == "timeout"
    assert time.monotonic() - begin < patience(60)
    deadline = time.monotonic() + patience(5)
    while marked(MARK, ready.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert marked(MARK, ready.read_text()) == []


def test_a_stop_from_outside_ends_the_trial(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    workload = Workload(model="lenet", batch_size=16)
    measurer = Measurer(workload=workload, topology=TOPOLOGY, command_of=python(HANG.format(ready=str(ready))))
    timer = threading.Timer(2.0, measurer.stop)
    timer.start()
    outcome = measurer.measure(CANDIDATE, 120.0)
    timer.join()
    assert outcome.status == "stopped"


def test_trials_do_not_inherit_the_search_s_own_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    code = f"import os; assert 'OPENBLAS_NUM_THREADS' not in os.environ; print('''{GOOD}''')"
    assert measure(code).status == "ok"


def test_nothing_is_left_in_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    measure("raise SystemExit(3)")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.mpi
def test_two_real_ranks_sit_on_disjoint_cores_seen_from_outside(tmp_path: Path) -> None:
    """Two ranks of a real trial use disjoint cores, as /proc/PID/status shows while they compute."""
    from hpcdl.node.machines import read_topology

    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        pytest.fail("two cores are needed to bind two ranks apart")
    topology = read_topology()
    settings = Settings(ranks_per_node=2, intra_op_threads=1, inter_op_threads=2, binding="compact")
    plan = launch_plan(topology, settings, 2, 2, openmp=False)
    workload = Workload(model="lenet", batch_size=8, steps=100_000)
    measurer = Measurer(workload=workload, topology=topology)
    worker = threading.Thread(target=measurer.measure, args=(Candidate(settings=settings, plan=plan), 110.0))
    worker.start()
    try:
        seen = set()
        deadline = time.monotonic() + patience(100)
        while len(seen) < 2 and time.monotonic() < deadline:
            seen = rank_masks()
            time.sleep(0.5)
    finally:
        measurer.stop()
        worker.join()
    assert seen == {(plan.cpus_by_local_rank[0]), (plan.cpus_by_local_rank[1])}


def rank_masks() -> set[tuple[int, ...]]:
    """Return the CPU masks of bound rank processes: those narrower than this process's."""
    from hpcdl.core.units import parse_list

    masks = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if b"hpcdl.bench.step" not in (entry / "cmdline").read_bytes():
                continue
            if f"{trials.MARK}=".encode() not in (entry / "environ").read_bytes():
                continue
            lines = (entry / "status").read_text().splitlines()
        except OSError:
            continue
        text = next(line for line in lines if line.startswith("Cpus_allowed_list:")).partition(":")[2]
        masks.add(parse_list(text))
    return {mask for mask in masks if len(mask) < len(os.sched_getaffinity(0))}


def test_outside_of_an_allocation_trials_run_here() -> None:
    assert trial_prefixes({}) == [[]]
    assert trial_prefixes({"SLURM_JOB_NODELIST": "c101"}) == [[]]


def test_every_node_of_an_allocation_runs_trials() -> None:
    prefixes = trial_prefixes({"SLURM_JOB_NODELIST": "c[101-103]"})
    assert [next(word for word in prefix if "nodelist" in word) for prefix in prefixes] == [
        f"--nodelist=c{number}" for number in (101, 102, 103)
    ]
    assert all(prefix[0] == "srun" for prefix in prefixes)
    assert [node_of(prefix) for prefix in prefixes] == ["c101", "c102", "c103"]
    assert node_of([]) == ""


def test_a_trial_does_not_take_itself_for_a_rank() -> None:
    assert shed({"SLURM_PROCID": "0", "PMI_RANK": "1", "PATH": "/bin"}) == {"PATH": "/bin"}
    code = "import os; print([name for name in os.environ if name.startswith('SLURM')])"
    command = [sys.executable, "-m", "hpcdl.tuning.trials", sys.executable, "-c", code]
    environment = os.environ | {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.lab
@pytest.mark.mpi
@pytest.mark.soak
def test_trials_run_on_every_node_of_a_real_allocation(lab_slurm: SlurmLab) -> None:
    """Trials run on both nodes of an allocation: srun takes each trial to its node, which starts two ranks."""
    folder = lab_slurm.shared / "tuning"
    folder.mkdir(mode=0o777)
    (folder / "s.toml").write_text("only = true\nranks_per_node = [2]\nintra_op_threads = [1]\nbinding = ['none']\n")
    words = [sys.executable, "-m", "hpcdl", "tune-threads", "--model", "lenet", "--batch-size", "8", "--steps", "2"]
    words += ["--space", "s.toml", "--budget", "4m", "--precision", "0.9", "--out", "p.toml", "--log", "log.jsonl"]
    words += ["--max-samples", "4"]
    finished = lab_slurm.run(
        ["salloc", "--nodes=2", "--quiet", "--exclusive", *words], user="root", cwd=folder, timeout_s=400
    )
    assert finished.code == 0, finished.err
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()[1:]]
    assert {entry["status"] for entry in entries} == {"ok"}, entries
    assert len({entry["node"] for entry in entries}) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["log.jsonl", "p.toml", "s.toml"]


def test_last_words_are_kept_to_their_end_where_the_remedy_stands(tmp_path: Path) -> None:
    words = f"not finite; samples {', '.join(map(str, range(90)))}; continue with hpcdl train --resume"
    (tmp_path / "log").write_text(f"noise\nhpcdl: {words}\n")
    assert trials.last_words(tmp_path / "log", 1) == f"exit code 1: {words}"
    (tmp_path / "log").write_text("x" * 5000)
    assert trials.last_words(tmp_path / "log", 1).endswith("xx ..."), "what was cut off is marked"
