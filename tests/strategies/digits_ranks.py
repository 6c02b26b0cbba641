"""Ranks that train one strategy after another as `hpcdl train` does, in one TensorFlow start.

`python digits_ranks.py CASES.json` under mpiexec. A case holds the settings of a run; ranks beyond it wait. `plant` in
a case makes one rank fail: {"rank": 1, "step": 5, "kind": "exception" | "nan" | "signal"}.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcdl.supervision import runtime

runtime.silence()

import numpy as np  # noqa: E402

from hpcdl.comm.mpi.communicator import world  # noqa: E402  TensorFlow must find its environment set
from hpcdl.config.load import Layer, load  # noqa: E402
from hpcdl.config.schema import TrainConfig  # noqa: E402
from hpcdl.core.errors import StoppedEarly  # noqa: E402
from hpcdl.core.processes.streams import STOPS  # noqa: E402
from hpcdl.core.protocols import Communicator  # noqa: E402
from hpcdl.rank.job import run_rank  # noqa: E402
from hpcdl.run import rundir  # noqa: E402
from hpcdl.run.plan import prepare  # noqa: E402
from hpcdl.strategies.elastic.flat import FlatWorker  # noqa: E402


def plant(fault: dict[str, Any], rank: int, happened: Path) -> Callable[[], None]:
    """Make this rank fail before a step if the fault names it; return a function that undoes the change.

    The other ranks wait in that step until the fault has `happened`: a rank that gets no processor time would otherwise
    find the run over before its own step.
    """
    plain = FlatWorker.before_step

    def before_step(self: FlatWorker, step: int) -> None:
        plain(self, step)
        patience = time.monotonic() + 60
        while rank != fault["rank"] and step == fault["step"] and not happened.exists():
            assert time.monotonic() < patience, f"rank {fault['rank']} did not come to step {step}"
            time.sleep(0.01)
        if rank == fault["rank"] and step == fault["step"]:
            happened.touch()
            if fault["kind"] == "exception":
                raise RuntimeError("planted")
            if fault["kind"] == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                honest = self.replica.step
                self.replica.step = lambda gradient: honest(gradient * np.float32("nan"))  # type: ignore[method-assign]

    def undo() -> None:
        FlatWorker.before_step = plain  # type: ignore[method-assign]

    FlatWorker.before_step = before_step  # type: ignore[method-assign]
    return undo


def run_case(case: dict[str, Any], everybody: Communicator) -> None:
    """Train in `run-dir`; write an early stop there."""
    for number in STOPS:  # a run is a fresh process: a signal of the previous case must not reach it
        signal.signal(number, signal.SIG_DFL)
    fault = case.pop("plant", {"rank": -1, "step": -1})
    undo = plant(fault, everybody.rank, Path(f"{case['run-dir']}-planted"))
    try:
        train(case, everybody)
    finally:
        undo()


def train(case: dict[str, Any], everybody: Communicator) -> None:
    """Train on the ranks of the case; the others return at once."""
    resolved = load(TrainConfig, [Layer(origin="flag", values=case)])
    run_dir = Path(case["run-dir"])
    takes_part = everybody.rank < case["ranks"]
    group = everybody.split(0 if takes_part else 1)
    if not takes_part:
        return
    if group.rank == 0 and not run_dir.exists():
        rundir.create(run_dir, resolved, "")
    group.barrier()
    try:
        run_rank(prepare(resolved), group, run_dir)
    except StoppedEarly as error:  # all of the case's ranks, servers too, have agreed on it: the next case may start
        (run_dir / f"stopped-{group.rank}.txt").write_text(str(error))
    except BaseException:  # noqa: BLE001  whatever it is, the other ranks must not wait for this one
        traceback.print_exc()
        everybody.abort(1)


def main() -> None:
    """Run the cases of a file."""
    faulthandler.register(signal.SIGUSR2)
    everybody = world()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        began = time.monotonic()
        run_case(case, everybody)
        everybody.barrier()
        if everybody.rank == 0:
            print(f"{case['strategy']}: {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
