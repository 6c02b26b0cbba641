"""One rank of easgd_pairs.py: train one case after another, with one worker three times slower than the others."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.supervision import runtime

runtime.silence()

import numpy as np  # noqa: E402

from hpcdl.comm.mpi.communicator import world  # noqa: E402  TensorFlow must find its environment set
from hpcdl.config.load import Layer, load  # noqa: E402
from hpcdl.config.schema import TrainConfig  # noqa: E402
from hpcdl.core.errors import HpcdlError  # noqa: E402
from hpcdl.core.protocols import Communicator  # noqa: E402
from hpcdl.core.records.run_record import read_record  # noqa: E402
from hpcdl.rank.job import run_rank  # noqa: E402
from hpcdl.run import rundir  # noqa: E402
from hpcdl.run.plan import prepare  # noqa: E402
from hpcdl.strategies.elastic.flat import FlatWorker  # noqa: E402

SLOW_RANK, SLOW_FACTOR = 1, 3


@dataclass
class Timing:
    """When this rank's first step ended, and when the current gradient began."""

    began: float = 0.0
    first_step_at: float = 0.0


def install(timing: Timing, *, slow: bool) -> None:
    """Time every worker of this process; if `slow`, its gradients take three times as long."""
    plain_before, plain_step = FlatWorker.before_step, FlatWorker._step

    def before_step(self: FlatWorker, step: int) -> None:
        timing.began = time.perf_counter()
        plain_before(self, step)

    def with_gradient(self: FlatWorker, gradient: Any) -> Any:
        # The first step compiles, which is not computing.
        if slow and timing.first_step_at:
            time.sleep((SLOW_FACTOR - 1) * (time.perf_counter() - timing.began))
        moved = plain_step(self, gradient)
        timing.first_step_at = timing.first_step_at or time.monotonic()
        return moved

    FlatWorker.before_step = before_step  # type: ignore[method-assign]
    FlatWorker._step = with_gradient  # type: ignore[method-assign]


def gather_quietly(everybody: Communicator) -> None:
    """A barrier in which early ranks sleep: a rank without a part in a run must not take a core from the others."""
    token = np.zeros(1)
    if everybody.rank:
        everybody.isend(token, 0, 7).wait()
        everybody.wait_any([everybody.irecv(token, 0, 8)])
        return
    for rank in range(1, everybody.size):
        everybody.wait_any([everybody.irecv(token, rank, 7)])
    for rank in range(1, everybody.size):
        everybody.isend(token, rank, 8).wait()


def train(case: dict[str, Any], everybody: Communicator, timing: Timing, results: Path) -> dict[str, Any] | None:
    """Train one case; return its results on rank 0."""
    run_dir = Path(case["run-dir"])
    resolved = load(TrainConfig, [Layer(origin="flag", values=case)])
    timing.first_step_at = 0.0
    takes_part = everybody.rank < case["ranks"]
    group = everybody.split(0 if takes_part else 1)
    if takes_part:
        if group.rank == 0:
            rundir.create(run_dir, resolved, {})
        group.barrier()
        try:
            run_rank(prepare(resolved), group, run_dir)
        except HpcdlError as error:  # diverged: servers still wait for the end
            print(f"{case['strategy']} {case['learning-rate']:g} {case['seed']}: {error}", flush=True)
            if "not finite" in str(error) or "is nan" in str(error) or "is inf" in str(error):
                results.with_suffix(".diverged").touch()
            everybody.abort(1)
        except BaseException:  # noqa: BLE001  whatever it is, the other ranks must not wait for this one
            traceback.print_exc()
            everybody.abort(1)
    gather_quietly(everybody)
    if everybody.rank:
        return None
    record = read_record(run_dir)
    reached = next((point for point in record.history if (point.val_accuracy or 0) >= case["target-accuracy"]), None)
    if reached is None:
        return {"seconds": None, "steps": None, "staleness": record.staleness_mean}
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    at = next(event["monotonic_s"] for event in events if event["kind"] == "epoch" and event["step"] == reached.step)
    # The last evaluation counts: at most one test of 360 images.
    return {"seconds": at - timing.first_step_at, "steps": reached.step, "staleness": record.staleness_mean}


def main() -> None:
    """Run CASES.json RESULTS.json DEADLINE."""
    cases, results, deadline = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    everybody = world()
    timing = Timing()
    install(timing, slow=everybody.rank == SLOW_RANK)
    found: list[Any] = []
    for case in json.loads(cases.read_text()):
        if everybody.allgather_json(time.monotonic() > deadline)[0]:
            break
        found.append(train(case, everybody, timing, results))
        if everybody.rank == 0:
            print(case["strategy"], case["learning-rate"], case["seed"], found[-1], flush=True)
            results.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
