"""Jobs on a real Slurm: four nodes, the limit's warning, a killed rank and a cancelled job, by `hpcdl submit` alone."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcdl.cluster.launchers.mpiexec import find_mpiexec
from tests.conftest import CommandLine, patience
from tests.lab.desk import Desk
from tests.lab.hosts import LOGIN
from tests.lab.slurm import SlurmLab

pytestmark = pytest.mark.lab

# The job's first start is slow, so that the warning arrives during training; sleeping changes no number.
SLOW_AT_FIRST = """
import os, time
import keras, numpy, tensorflow as tf

@keras.saving.register_keras_serializable()
class Pause(keras.layers.Layer):
    def call(self, images):
        pause = tf.numpy_function(lambda: time.sleep(0.2) or numpy.float32(0), [], tf.float32)
        return images + 0.0 * tf.reshape(pause, [1, 1, 1, 1])

def build(num_classes, input_shape):
    layers = [keras.Input(input_shape)]
    if "SLURM_JOB_ID" in os.environ and os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        layers.append(Pause())
    layers += [keras.layers.Flatten(), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(num_classes)]
    return keras.Sequential(layers)
"""


@pytest.fixture(scope="module")
def desk(lab_slurm: SlurmLab, shards: Path) -> Iterator[Desk]:
    folder = lab_slurm.shared / "desk"
    folder.mkdir()
    shutil.copytree(shards, folder / "shards")  # hosts do not see this machine's /tmp
    (folder / "slow.py").write_text(SLOW_AT_FIRST)
    yield Desk(lab_slurm, folder)
    lab_slurm.cancel_all()


def test_ranks_meet_whatever_is_on_their_heaps(desk: Desk) -> None:
    """Ranks start whatever is on their heaps: MPICH would send Slurm the memory behind its address, in long lines."""
    if find_mpiexec().flavour != "mpich":
        pytest.skip("srun --mpi=pmi2 starts MPICH's ranks")
    line = ["timeout", "60", "srun", "--mpi=pmi2", "-N4", "-n4", desk.python, "-m", "tests.lab.dirty_rank"]
    finished = desk.lab.run(line, host=LOGIN, cwd=desk.folder, env=desk.environment, timeout_s=100)
    assert (finished.code, finished.out) == (0, "4 ranks have met\n"), finished.err[-2000:]


@pytest.mark.soak
def test_a_job_trains_on_four_nodes(desk: Desk) -> None:
    """A job trains on four nodes; `make test-all` has the tutorial's (test_session.py)."""
    number = desk.submit(
        "--nodes", "4", "--time", "10m", "--",
        "--model", "lenet", "--data", "shards", "--batch-size", "8", "--steps", "4", run="four",
    )  # fmt: skip
    job = desk.lab.wait_for_job(number, timeout_s=400)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), desk.log(number)
    record = json.loads((desk.folder / "four" / "record.json").read_text())
    assert (record["ranks"], record["hosts"]) == (4, ["node1", "node2", "node3", "node4"])
    assert (record["status"], record["steps"]) == ("finished", 4)
    view = desk.view(number)
    assert (view["state"], view["steps"]) == ("completed", 4) and view["log_tail"]


def test_a_job_at_its_limit_saves_requeues_and_ends_with_the_same_losses(
    desk: Desk, session_hpcdl: CommandLine
) -> None:
    settings = ("--model", f"{desk.folder}/slow.py:build", "--data", f"{desk.folder}/shards", "--deterministic")
    settings = (*settings, "--batch-size", "8", "--steps", "300", "--seed", "3")
    number = desk.submit(
        "--nodes", "2", "--time", "2m", "--warning", "60s", "--until-done", "--max-requeues", "6", "--",
        *settings, run="limit",
    )  # fmt: skip
    undisturbed = session_hpcdl(["train", *settings, "--ranks", "2", "--run-dir", desk.folder / "whole"], timeout_s=300)
    assert undisturbed.code == 0, undisturbed.err
    job = desk.lab.wait_for_job(number, timeout_s=500)
    assert job["JobState"] == "COMPLETED" and int(job["Restarts"]) >= 1, desk.log(number)
    assert "a checkpoint is saved" in desk.log(number)
    losses = [json.loads((desk.folder / run / "record.json").read_text())["loss"] for run in ("limit", "whole")]
    assert losses[0] == losses[1]


def test_a_killed_rank_ends_the_job_and_is_named(desk: Desk) -> None:
    number = desk.submit(
        "--nodes", "2", "--time", "10m", "--",
        "--model", "lenet", "--data", "shards", "--batch-size", "8", "--steps", "100000", run="killed",
    )  # fmt: skip
    desk.wait_for_steps("killed")
    status = desk.status("killed", 1)
    assert status.host == "node2"
    began = time.monotonic()
    assert desk.lab.run(["kill", "-9", str(status.pid)], host="node2").code == 0
    job = desk.lab.wait_for_job(number, timeout_s=300)
    assert job["JobState"] == "FAILED" and time.monotonic() - began < patience(60)
    assert "rank 1 on node2 ended without a word" in desk.log(number)


def test_a_cancelled_job_saves_and_is_not_requeued(desk: Desk) -> None:
    number = desk.submit(
        "--nodes", "2", "--time", "10m", "--until-done", "--",
        "--model", "lenet", "--data", "shards", "--batch-size", "8", "--steps", "100000", run="cancelled",
    )  # fmt: skip
    desk.wait_for_steps("cancelled")
    finished = desk.hpcdl("cancel", str(number))
    assert finished.code == 0 and "--resume" in finished.err, finished.err
    job = desk.lab.wait_for_job(number, timeout_s=300)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), desk.log(number)
    assert list((desk.folder / "cancelled" / "checkpoints").iterdir())


def test_an_mpi_that_does_not_fit_is_refused_at_the_start(desk: Desk) -> None:
    """An MPI that does not match is refused: srun --mpi=none starts as many jobs of one rank as there are ranks."""
    (desk.folder / "wrong.sh").write_text(
        f"#!/bin/bash\nexport HPCDL_SRUN_MPI=none\nexec {sys.executable} -m hpcdl train --model lenet --data shards "
        "--ranks 2 --batch-size 8 --steps 2 --run-dir wrong\n"
    )
    line = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--output=wrong.txt", desk.folder / "wrong.sh"]
    finished = desk.lab.run(line, cwd=desk.folder)
    assert finished.code == 0, finished.err
    job = desk.lab.wait_for_job(int(finished.out), timeout_s=300)
    assert job["JobState"] == "FAILED" and job["ExitCode"] == "2:0"
    reported = (desk.folder / "wrong.txt").read_text()
    assert "2 ranks were asked for but MPI started 1" in reported and "--mpi=pmi2" in reported


@pytest.mark.soak
def test_ranks_that_the_user_starts_leave_together(desk: Desk) -> None:
    """Under the user's own srun a stop that can be resumed is 75 for all ranks; a rank that fails ends the others.

    `make test-all` shows it for ranks of a script (below).
    """
    train = f"srun -K1 --mpi=pmi2 -N2 {sys.executable} -m hpcdl train --model lenet --data shards --batch-size 8"
    (desk.folder / "own.sh").write_text(
        f"#!/bin/bash\n{train} --steps 100000 --time-limit 2s --run-dir own-stop\necho first $?\n"
        f"{train} --steps 100000 --learning-rate 3e38 --run-dir own-nan\necho second $?\n"
    )
    line = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--output=own.txt", desk.folder / "own.sh"]
    finished = desk.lab.run(line, cwd=desk.folder)
    assert finished.code == 0, finished.err
    desk.lab.wait_for_job(int(finished.out), timeout_s=300)
    reported = (desk.folder / "own.txt").read_text()
    first, _, second = reported.partition("\nfirst ")
    assert second.startswith("75\n"), reported
    assert first.count("continue with --resume") == 1 and list((desk.folder / "own-stop" / "checkpoints").iterdir())
    # srun reports 137 for ranks that it killed, whatever the code of the failed one.
    assert ("\nsecond 1\n" in reported or "\nsecond 137\n" in reported) and "Traceback" not in second, reported
    assert "hpcdl: rank " in second and "at step" in second


SCRIPT = """
import sys
import hpcdl
hpcdl.init()
from hpcdl.scripts.process.session import communicator
print("rank", hpcdl.rank(), "of", hpcdl.size(), "node", hpcdl.node_rank(), "local", hpcdl.local_rank(), flush=True)
if sys.argv[1] == "leaves" and hpcdl.rank() == 1:
    sys.exit(0)
if sys.argv[1] == "fails" and hpcdl.rank() == 1:
    sys.exit(3)
communicator().barrier()
"""


def test_a_script_runs_in_a_job_and_under_srun(desk: Desk) -> None:
    """A script runs in a submitted job and under srun, with its ranks, its record, and the end that one rank causes."""
    (desk.folder / "script.py").write_text(SCRIPT)
    words = ["--nodes", "2", "--time", "5m", "--", "run", "--run-dir", "script-submitted", "script.py", "plain"]
    submitted = desk.hpcdl("submit", *words)
    assert submitted.code == 0, submitted.err
    own = f"srun -K1 --mpi=pmi2 -N2 {sys.executable} -m hpcdl run"
    cases = ("plain", "leaves", "fails")
    lines = [f"{own} --run-dir script-{case} script.py {case}\necho {case} ended with $?" for case in cases]
    (desk.folder / "script.sh").write_text("\n".join(["#!/bin/bash", *lines]))
    line = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--output=script.txt", desk.folder / "script.sh"]
    finished = desk.lab.run(line, cwd=desk.folder)
    assert finished.code == 0, finished.err
    number = int(submitted.out.partition(".")[0])
    job = desk.lab.wait_for_job(number, timeout_s=300)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), desk.log(number)
    desk.lab.wait_for_job(int(finished.out), timeout_s=300)
    reported = (desk.folder / "script.txt").read_text()
    plain, leaves, fails = (part for part in reported.split(" ended with ")[:3])
    for text in (desk.log(number), plain):
        assert all(f"rank {rank} of 2 node {rank} local 0" in text for rank in (0, 1)), text
    for run in ("script-submitted", "script-plain"):
        record = desk.record(run)
        assert (record["status"], record["ranks"], len(set(record["hosts"]))) == ("finished", 2, 2)
    assert "plain ended with 0" in reported, reported
    assert "leaves ended with 0" not in reported and "fails ended with 0" not in reported, reported
    assert leaves.count("hpcdl: ") == 1 and "has left: its script has called sys.exit(0)" in leaves, reported
    assert fails.count("hpcdl: ") == 1 and "the script has called sys.exit(3), which ends all ranks" in fails, reported
    assert "Traceback" not in reported


def test_a_models_outputs_are_computed_on_two_nodes(desk: Desk) -> None:
    """Inference on two nodes, as a submitted job and by srun in a user's script, writes the same bytes as one rank."""
    train = ("--model", "lenet", "--data", "shards", "--batch-size", "8", "--steps", "4", "--run-dir", "served")
    assert desk.hpcdl("train", *train).code == 0
    words = ("infer", "served", "--data", "shards", "--deterministic", "--out")
    assert desk.hpcdl(*words, "outputs-alone").code == 0
    submitted = desk.hpcdl("submit", "--nodes", "2", "--time", "5m", "--", *words, "outputs-submitted")
    assert submitted.code == 0, submitted.err
    own = f"srun -K1 --mpi=pmi2 -N2 {sys.executable} -m hpcdl {' '.join(words)} outputs-srun"
    (desk.folder / "outputs.sh").write_text(f"#!/bin/bash\n{own}\n")
    line = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--output=outputs.txt", desk.folder / "outputs.sh"]
    finished = desk.lab.run(line, cwd=desk.folder, env=desk.environment)
    assert finished.code == 0, finished.err
    number = int(submitted.out.partition(".")[0])
    for job in (desk.lab.wait_for_job(number, timeout_s=300), desk.lab.wait_for_job(int(finished.out), timeout_s=300)):
        assert job["JobState"] == "COMPLETED", desk.log(number) + (desk.folder / "outputs.txt").read_text()
    alone = {path.name: path.read_bytes() for path in (desk.folder / "outputs-alone").rglob("*.h5")}
    for name in ("outputs-submitted", "outputs-srun"):
        assert {path.name: path.read_bytes() for path in (desk.folder / name).rglob("*.h5")} == alone, name
        assert len(set(desk.record(name)["hosts"])) == 2
        assert all(rank["details"]["num_samples"] > 0 for rank in desk.record(name)["rank_records"])


@pytest.mark.soak
def test_the_doctor_looks_at_all_nodes_of_a_job(desk: Desk) -> None:
    """The doctor checks all nodes of a job; `make test-all` has nodes with a fault each (test_doctor_nodes.py)."""
    words = ("--nodes", "4", "--name", "look", "--time", "5m", "--", "doctor", "--json", "--data", "shards")
    finished = desk.hpcdl("submit", *words)
    assert finished.code == 0, finished.err
    number = int(finished.out)
    job = desk.lab.wait_for_job(number, timeout_s=300)
    reported = desk.log(number)
    assert job["JobState"] == "COMPLETED", reported
    assert "4 hosts agree within" in reported and "ranks start here by slurm" in reported
    assert "srun --mpi=" in reported and "two ranks talk" in reported


@pytest.mark.parametrize(
    ("steps", "transports"),
    [
        (("async-easgd",), ()),
        pytest.param(("ring", "grpc-ring", "async-easgd"), ("mpi", "grpc"), marks=pytest.mark.soak),
    ],
    ids=["some", "all"],
)
def test_benchmarks_spread_over_the_nodes_of_a_job(
    desk: Desk, steps: tuple[str, ...], transports: tuple[str, ...]
) -> None:
    """Benchmarks of a step and a message, over MPI and gRPC, run on ranks that hpcdl starts from the batch script.

    `make test-all` has messages on one node (bench/test_pingpong.py).
    """
    step = f"{sys.executable} -m hpcdl bench step --model lenet --batch-size 4 --steps 4 --allow-grpc --json"
    message = f"{sys.executable} -m hpcdl bench pingpong --sizes 1B,64KiB --repeats 200 --allow-grpc --json"
    ranks = {name: 3 if name == "async-easgd" else 2 for name in steps}
    lines = [f"{step} --strategy {name} --ranks {ranks[name]} > {name}.json" for name in steps]
    lines += [f"{message} --transport {name} > {name}.json" for name in transports]
    (desk.folder / "bench.sh").write_text("\n".join(["#!/bin/bash", "set -e", *lines, ""]))
    line = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=2", "--overcommit", "--output=bench.txt", "bench.sh"]
    finished = desk.lab.run(line, cwd=desk.folder, env=desk.environment)
    assert finished.code == 0, finished.err
    job = desk.lab.wait_for_job(int(finished.out), timeout_s=400)
    assert job["JobState"] == "COMPLETED", (desk.folder / "bench.txt").read_text()
    for name in steps:
        found = json.loads((desk.folder / f"{name}.json").read_text())
        assert (found["workers"], found["nodes"], found["steps"]) == (2, 2, 4), name
    for name in transports:
        found = json.loads((desk.folder / f"{name}.json").read_text())
        assert found["hosts"] == ["node1", "node2"] and [row["bytes"] for row in found["rows"]] == [1, 65536], name
    assert not list((desk.folder / "cache").rglob("hpcdl-bench-*"))


@pytest.mark.soak
def test_ranks_of_two_nodes_read_at_once(desk: Desk) -> None:
    """Ranks of two nodes read input at once, started by srun or by hpcdl.

    `make test-all` has both on one node (bench/test_input.py).
    """
    bench = f"{sys.executable} -m hpcdl bench input shards --batch-size 8 --steps 8 --json"
    srun = "srun -K1 --mpi=pmi2 -N2 -n4 --overcommit"
    (desk.folder / "read.sh").write_text(f"#!/bin/bash\n{srun} {bench} > srun.json\n{bench} --ranks 4 > own.json\n")
    line = ["sbatch", "--parsable", "-N2", "--ntasks-per-node=1", "--output=read.txt", desk.folder / "read.sh"]
    finished = desk.lab.run(line, cwd=desk.folder, env=desk.environment)
    assert finished.code == 0, finished.err
    job = desk.lab.wait_for_job(int(finished.out), timeout_s=300)
    assert job["JobState"] == "COMPLETED", (desk.folder / "read.txt").read_text()
    num_shards = len(list((desk.folder / "shards").rglob("*.h5")))
    for name in ("srun", "own"):
        found = json.loads((desk.folder / f"{name}.json").read_text())
        assert (found["ranks"], found["nodes"]) == (4, 2), name
        assert {found["stored"][pace]["host"] for pace in ("slowest", "fastest")} <= {"node1", "node2"}
        assert found["metadata"]["start"]["all_ranks"] == {"opens": 4, "stats": 4 * (2 + num_shards)}, name
    assert not list((desk.folder / "cache").rglob("hpcdl-bench-*"))
