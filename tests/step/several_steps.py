"""Train networks of several kinds with one and with several steps per call, in this process.

`python several_steps.py FOLDER OUT.json`
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from hpcdl.supervision import runtime

runtime.silence()
runtime.import_tensorflow()

import keras  # noqa: E402  TensorFlow must find its environment set

from hpcdl.checkpoint.background import THREAD, BackgroundWork  # noqa: E402
from hpcdl.checkpoint.interval import CheckpointInterval  # noqa: E402
from hpcdl.checkpoint.memory import LocalCopies  # noqa: E402
from hpcdl.comm.observed import observe  # noqa: E402
from hpcdl.comm.threads import alone  # noqa: E402
from hpcdl.config.load import Layer, load  # noqa: E402
from hpcdl.config.schema import TrainConfig  # noqa: E402
from hpcdl.faults.inject import Injection  # noqa: E402
from hpcdl.rank.job import context_of  # noqa: E402
from hpcdl.rank.parts import Parts  # noqa: E402
from hpcdl.run.journal import NullJournal  # noqa: E402
from hpcdl.run.plan import prepare  # noqa: E402
from hpcdl.step import host as host_module  # noqa: E402
from hpcdl.strategies.table import load_strategy  # noqa: E402

STEPS = 12


class EveryStep(NullJournal):
    """Keep the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, step: int, **values: Any) -> None:
        """Keep one loss."""
        self.losses.append(values["loss"])


def stateful() -> keras.Model:
    """Build a network with normalisation, dropout and a regulariser."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(8, 3, strides=2, activation="relu", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )


CASES: dict[str, dict[str, Any]] = {
    "lenet": {"optimizer": "momentum", "schedule": "cosine"},
    "adam": {"optimizer": "adam", "schedule": "polynomial", "weight-decay": 0.01, "flip": True},
    "slices": {"accumulate": 2, "strategy": "ring"},
    "half": {"precision": "mixed_float16", "batch-size": 8},
}


def trained(case: str, settings: dict[str, Any], most: int | str, folder: Path) -> dict[str, Any]:
    """Return the losses and weights of STEPS steps, with at most `most` of them per call."""
    values = {
        "model": "lenet", "data": "synthetic:28x28x1:10@256", "strategy": "single", "steps": STEPS,
        "learning-rate": 0.02, "batch-size": 16, "deterministic": True, "steps-per-call": most, **settings,
    }  # fmt: skip
    run_plan = prepare(load(TrainConfig, [Layer(origin="test", values=values)]))
    keras.utils.set_random_seed(3)
    keras.mixed_precision.set_global_policy(run_plan.config.model.precision)
    group, journal = observe(alone()), EveryStep()
    worker = load_strategy(run_plan.info).worker(context_of(run_plan, group))
    faults, copies = Injection("", group.monitor, folder), LocalCopies(folder, folder, 0, 0, print)
    interval = CheckpointInterval(600.0, node_mtbf_s=1.0, num_nodes=1)
    model = stateful()
    work = BackgroundWork(THREAD, group.monitor)
    parts = Parts(run_plan, model, worker, group, journal, folder, faults, interval, copies, work)
    began, batches, reported, rates, calls = parts.start(), parts.batches(), [], [], []
    before = worker.before_step

    def noted(step: int) -> None:
        assert group.monitor.step == step
        reported.append(step)
        rates.append(worker.learning_rate)
        before(step)

    vars(worker)["before_step"] = noted
    while (done := parts.host.position.step) < STEPS:
        parts.host.run(batches, began, min(5, STEPS - done))
        calls.append(parts.host.position.step - done)
    worker.finish()
    digests = [hashlib.sha256(weight.numpy().tobytes()).hexdigest() for weight in model.weights]
    found = {"losses": journal.losses, "weights": digests, "told": reported, "rates": rates, "longest_call": max(calls)}
    batches.close()
    return found


def main() -> None:
    """Run every case with one step per call, with up to three, and with the default."""
    runtime.configure(deterministic=True, seed=3)
    host_module.CALL_S = 600.0  # on a busy machine a call has time for only one step
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = {
        case: {str(most): trained(case, settings, most, folder) for most in (1, 3, "auto")}
        for case, settings in CASES.items()
    }
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
