"""Check whether hpcdl works on the GPUs of this node, in some minutes: a table, and a file to send home.

    python benchmarks/gpu_check.py [--device gpu|cpu] [--out gpu-check.json] [--network resnet50]

Exit codes: 0 everything passes, 1 something fails, 77 this node has no GPU and nothing was tried. `--device cpu` runs
the same checks on two ranks without a GPU, which tests this program, not GPUs. On a node with one GPU, two ranks share
it. The file names no host and no user.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.core.records.run_record import RunRecord, read_record
from hpcdl.node.accelerators import described
from hpcdl.node.profile import describe, read_profile
from hpcdl.rank.results import now_text
from hpcdl.strategies.table import STRATEGIES

NO_GPU = 77
TIMEOUT_S = 240
MOST_RANKS = 4
AT_ONCE = max(4, (os.cpu_count() or 1) // 2)
"""Trainings run concurrently if only their results count: starting takes longer than the steps."""
STEPS, BATCH_SIZE = 10, 32
PERIOD = 4
"""Period of strategies that exchange rarely: their default is longer than these trainings."""
SIZES = {"resnet50": ("synthetic:128x128x3:100", 32, 40), "lenet": ("synthetic:28x28x1:10", 32, 40)}
"""Data, batch and steps of the timed networks."""
NEAR = 0.02
"""Tolerance, relative to a tensor's largest element: GPUs multiply float32 with 10 bits (TF32) by default."""
DEVICES = """
import json, tensorflow as tf
built = tf.sysconfig.get_build_info()
gpus = [tf.config.experimental.get_device_details(one) for one in tf.config.list_physical_devices("GPU")]
print(json.dumps({"gpus": gpus, "tensorflow": tf.__version__, "cuda": built.get("cuda_version", ""),
                  "cudnn": built.get("cudnn_version", "")}))
"""
COMPARE = """
import json, sys, numpy, keras
first, *others = ([w for w in keras.models.load_model(path).get_weights()] for path in sys.argv[1:])
apart = [max(float(abs(a - b).max() / max(abs(b).max(), 1e-6)) for a, b in zip(one, first)) for one in others]
print(json.dumps(apart))
"""
FIT = """
import json, sys, time, numpy, keras, tensorflow as tf
from hpcdl.models.load import load_model
name, shape, classes, batch, steps, xla = json.loads(sys.argv[1])
model = load_model(name, classes=classes, input_shape=shape)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.01), loss, jit_compile=xla)
x = numpy.random.default_rng(0).random((batch * 4, *shape), numpy.float32)
y = numpy.arange(batch * 4) % classes
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).repeat().prefetch(2)
class Watch(keras.callbacks.Callback):
    at = []
    def on_train_batch_end(self, batch, logs=None): self.at.append(time.perf_counter())
watch = Watch()
model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[watch])
took = numpy.diff(watch.at[10:])
print(json.dumps(batch / float(numpy.mean(took))))
"""
SCRIPT = """
import hpcdl; hpcdl.init()
import keras, numpy
x = numpy.random.default_rng(hpcdl.rank()).random((64, 8), numpy.float32)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
model.compile(hpcdl.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
model.fit(x, x[:, :4], batch_size=8, epochs=2, verbose=0, callbacks=[hpcdl.callbacks()])
"""


class CheckFailed(Exception):
    """A failure that the site should read about."""


@dataclass
class Trial:
    """Shared by the checks: the output folder, the number of GPUs, and whether GPUs are tested at all."""

    folder: Path
    on_gpu: bool
    network: str
    num_ranks: int = 2
    gpus: Sequence[Mapping[str, Any]] = ()
    notes: dict[str, Any] = field(default_factory=dict)
    """Numbers for the file: rates, and parts of a step in seconds."""

    @property
    def model(self) -> tuple[str, ...]:
        """Flags of the small network and its data."""
        return ("--model", f"{__file__}:build", "--data", "synthetic:32x32x3:10")

    @property
    def parallel(self) -> tuple[str, ...]:
        """Flags of two ranks or more, whose global batch `single` has too."""
        return ("--ranks", str(self.num_ranks), "--batch-size", str(BATCH_SIZE))

    def train(self, name: str, *words: str, hidden: bool = False) -> RunRecord:
        """Train briefly into the folder `name`; return the record. `hidden`: on the CPU, even if there are GPUs."""
        run_dir = self.folder / name
        line = ["--learning-rate", "0.01", "--profile", "none", "--run-dir", str(run_dir), *words]
        self.run([sys.executable, "-m", "hpcdl", "train", *line], hidden=hidden)
        record = read_record(run_dir)
        parts = {part: round(seconds, 6) for part, seconds in record.parts.items()}
        self.notes[name] = {"samples_per_s": record.images_per_second, "parts_s": parts}
        if self.on_gpu and not hidden and sum(record.accelerators.values()) != record.workers:
            raise CheckFailed(f"{record.workers} workers, on GPUs {dict(record.accelerators)}: {record.warnings}")
        return record

    def run(self, line: Sequence[str], *, hidden: bool = False, most_s: int = TIMEOUT_S) -> str:
        """Return a command's output; raises CheckFailed with its last line if it fails."""
        hide = {"CUDA_VISIBLE_DEVICES": ""} if hidden or not self.on_gpu else {}
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **hide}
        try:
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=most_s, check=False)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"did not end in {most_s} s: {' '.join(line)[-300:]}") from None
        if done.returncode:
            said = (done.stderr.strip() or done.stdout.strip() or "no word").splitlines()[-1]
            raise CheckFailed(f"{said} (exit code {done.returncode}; {' '.join(line)[-300:]})")
        return done.stdout

    def apart(self, first: str, *others: str) -> dict[str, float]:
        """Return by run its weights' largest difference from those of `first`, relative to the tensor's largest."""
        models = [str(self.folder / name / "model.keras") for name in (first, *others)]
        found = json.loads(self.run([sys.executable, "-c", COMPARE, *models], hidden=True))
        return dict(zip(others, found, strict=True))


def build(num_classes: int, input_shape: tuple[int, ...]) -> Any:
    """Build a small network for `hpcdl train`."""
    import keras

    layers = keras.layers
    return keras.Sequential([
        keras.Input(input_shape), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(num_classes),
    ])  # fmt: skip


def one_rank(trial: Trial) -> str:
    """One rank trains, on the intended device."""
    batch = str(trial.num_ranks * BATCH_SIZE)
    record = trial.train("single", *trial.model, "--strategy", "single", "--batch-size", batch, "--steps", str(STEPS))
    busy = record.rank_records[0].gpu_utilisation
    used = "" if busy is None else f", which was busy {100 * busy:.0f} % of the time"
    return f"{record.images_per_second:.0f} samples/s on {next(iter(record.accelerators), 'the CPU')}{used}"


def own_gpu(trial: Trial) -> str:
    """Each rank computes on a GPU: on its own if there are enough."""
    record = trial.train("ring", *trial.model, "--strategy", "ring", *trial.parallel, "--steps", str(STEPS))
    sharing = [warning for warning in record.warnings if "share GPU" in warning]
    expected = trial.on_gpu and len(trial.gpus) < trial.num_ranks
    if bool(sharing) != expected:
        raise CheckFailed(f"{trial.num_ranks} ranks on {len(trial.gpus)} GPUs: {sharing or 'no warning of sharing'}")
    return f"{trial.num_ranks} ranks over MPI" + (", sharing one GPU" if sharing else "")


def every_strategy(trial: Trial) -> str:
    """All strategies over MPI train; those that equal `single` reach its weights."""
    # TensorFlow's own strategies have their own check; hogwild's window is in host memory like the others'.
    names = [name for name, info in STRATEGIES.items() if info.features.mpi and name not in ("single", "ring")]

    def attempt(name: str) -> str:
        info = STRATEGIES[name]
        ranks = trial.num_ranks + (1 if info.features.servers else 0)
        words = ("--ranks", str(ranks), "--batch-size", str(BATCH_SIZE), "--steps", str(STEPS))
        meets = ("--period", str(PERIOD)) if info.features.periodic else ()
        try:
            trial.train(name, *trial.model, "--strategy", name, *words, *meets)
        except CheckFailed as error:
            return f"{name}: {error}"
        return ""

    with ThreadPoolExecutor(AT_ONCE) as pool:
        problems = [problem for problem in pool.map(attempt, names) if problem]
    trained = [name for name in names if (trial.folder / name / "model.keras").exists()]
    equal = ["ring", *(name for name in trained if STRATEGIES[name].features.equals_single)]
    apart = trial.apart("single", *equal)
    trial.notes["apart_from_single"] = apart
    problems += [f"{name} is {value:.2g} from single's weights" for name, value in apart.items() if not value <= NEAR]
    if problems:
        raise CheckFailed("; ".join(problems))
    return f"{len(names)} train; {len(equal)} reach single's weights to {max(apart.values()):.1g}"


def repeats(trial: Trial) -> str:
    """`--deterministic` gives the same bits twice; half precision trains."""
    runs = {
        "twice-1": ("--deterministic",), "twice-2": ("--deterministic",),
        "float16": ("--precision", "mixed_float16"), "bfloat16": ("--precision", "mixed_bfloat16"),
    }  # fmt: skip

    def attempt(name: str) -> RunRecord:
        words = (*trial.model, "--strategy", "ring", *trial.parallel, "--steps", str(STEPS))
        return trial.train(name, *words, *runs[name])

    with ThreadPoolExecutor(AT_ONCE) as pool:
        records = list(pool.map(attempt, runs))
    apart = trial.apart("twice-1", "twice-2")["twice-2"]
    if apart:
        raise CheckFailed(f"--deterministic: two runs are {apart:.2g} apart")
    losses = [f"{name} {record.loss:.3f}" for name, record in zip(runs, records, strict=True)]
    return f"the same bits twice; loss of {', '.join(losses[2:])}"


def resumes(trial: Trial) -> str:
    """A killed rank costs only time: new ranks resume and reach the same weights."""
    words = (
        "--strategy",
        "ring",
        *trial.parallel,
        "--steps",
        str(STEPS),
        "--elastic",
        "--inject",
        "kill:rank=1@step=5",
    )
    record = trial.train("killed", *trial.model, *words)
    apart = trial.apart("ring", "killed")["killed"]
    if not apart <= NEAR:
        raise CheckFailed(f"after a kill and a restart weights are {apart:.2g} from the undisturbed run's")
    return f"rank 1 killed at step 5; resumed from {list(record.resumed_from_steps)}; weights {apart:.1g} apart"


def script(trial: Trial) -> str:
    """A user's script runs under `hpcdl run`."""
    path = trial.folder / "script.py"
    path.write_text(SCRIPT)
    line = ["run", "--ranks", str(trial.num_ranks), "--run-dir", str(trial.folder / "script"), "--", str(path)]
    trial.run([sys.executable, "-m", "hpcdl", *line])
    record = read_record(trial.folder / "script")
    if trial.on_gpu and sum(record.accelerators.values()) != trial.num_ranks:
        raise CheckFailed(f"{trial.num_ranks} ranks, on GPUs {dict(record.accelerators)}: {record.warnings}")
    return f"fit on {trial.num_ranks} ranks"


def faster(trial: Trial) -> str:
    """The GPU is faster than the processors."""
    if not trial.on_gpu:
        return "not tried without a GPU"
    batch = str(trial.num_ranks * BATCH_SIZE)
    words = (*trial.model, "--strategy", "single", "--batch-size", batch, "--steps", str(STEPS))
    cpu = trial.train("cpu", *words, hidden=True).images_per_second or 0.0
    gpu = trial.notes["single"]["samples_per_s"]
    if not gpu > cpu:
        raise CheckFailed(f"the GPU does {gpu:.0f} samples/s, the CPU {cpu:.0f}")
    return f"{gpu / cpu:.1f} times the CPU's samples/s"


def tuned(trial: Trial) -> str:
    """`tune-threads` compares host threads with one rank per GPU, and its profile says so."""
    path = trial.folder / "profile.toml"
    words = ["--model", "lenet", "--batch-size", str(BATCH_SIZE), "--steps", "5", "--max-samples", "3"]
    trial.run([sys.executable, "-m", "hpcdl", "tune-threads", *words, "--budget", "90s", "--out", str(path)])
    profile = read_profile(path)
    if bool(profile.devices) != trial.on_gpu:
        raise CheckFailed(f"the profile was measured on {described(profile.devices) or 'CPUs'}")
    where = described(profile.devices) or "CPUs"
    return f"{profile.images_per_second:.0f} samples/s on {where} in 3 samples, with {describe(profile.settings)}"


def beside_fit(trial: Trial) -> str:
    """Compare one device under `hpcdl train` with Keras's fit; then measure the exchange of two ranks."""
    data, batch, steps = SIZES[trial.network]
    shape, classes = [int(side) for side in data.split(":")[1].split("x")], int(data.split(":")[2])
    words = ("--model", trial.network, "--data", data, "--batch-size", str(batch), "--steps", str(steps))
    ours = trial.train("timed", *words, "--strategy", "single").images_per_second or 0.0
    fits = {}
    for name, xla in (("fit", False), ("fit-xla", True)):
        asked = json.dumps([trial.network, shape, classes, batch, steps, xla])
        try:
            fits[name] = float(json.loads(trial.run([sys.executable, "-c", FIT, asked]).splitlines()[-1]))
        except CheckFailed as error:
            fits[name] = 0.0
            trial.notes[name] = str(error)
    trial.notes["fit_samples_per_s"] = fits
    for strategy in ("ring", "mpi"):
        trial.train(f"timed-{strategy}", *words, "--strategy", strategy, "--ranks", str(trial.num_ranks))
    ring = trial.notes["timed-ring"]
    if not fits["fit"]:
        raise CheckFailed(f"Keras's fit failed: {trial.notes['fit']}")
    exposed_ms = 1e3 * ring["parts_s"]["exposed_communication"]
    text = (
        f"{trial.network}, batch {batch}: {ours:.0f} samples/s, fit {fits['fit']:.0f}, with XLA {fits['fit-xla']:.0f}; "
    )
    text += f"{trial.num_ranks} ranks {ring['samples_per_s']:.0f}, {exposed_ms:.1f} ms of exchange exposed"
    if ours < 0.8 * fits["fit"]:
        raise CheckFailed(f"slower than fit: {text}")
    return text


def tensorflows_own(trial: Trial) -> str:
    """TensorFlow's ring over gRPC, and NCCL with a GPU per rank; NCCL is refused if ranks share one."""
    words = ("--allow-grpc", "--steps", str(STEPS), "--batch-size", str(BATCH_SIZE), "--ranks")
    ranks = {"grpc-ring": trial.num_ranks, "nccl": min(trial.num_ranks, len(trial.gpus)) or trial.num_ranks}
    for name, number in ranks.items():
        trial.train(name, *trial.model, "--strategy", name, *words, str(number))
    alone = ranks["nccl"] == 1
    apart = trial.apart("single", "grpc-ring", *([] if alone else ["nccl"]))
    if not max(apart.values()) <= NEAR:
        raise CheckFailed(f"apart from single's weights: {apart}")
    if alone:
        try:
            trial.train("nccl-shared", *trial.model, "--strategy", "nccl", *words, "2")
        except CheckFailed as refused:
            if "share GPU" not in str(refused):
                raise
        else:
            raise CheckFailed("nccl trains two ranks on one GPU")
    rates = {name: trial.notes[name]["samples_per_s"] for name in ("ring", *ranks)}
    return f"{json.dumps({name: round(rate) for name, rate in rates.items()})} samples/s; nccl on {ranks['nccl']} ranks"


CHECKS: Mapping[str, Callable[[Trial], str]] = {
    "one rank": one_rank,
    "a GPU for each rank": own_gpu,
    "every strategy": every_strategy,
    "repeats, half precision": repeats,
    "a killed rank": resumes,
    "a user's script": script,
    "faster than the CPU": faster,
    "tune-threads": tuned,
    "beside Keras's fit": beside_fit,
    "TensorFlow's collectives": tensorflows_own,
}


@dataclass(frozen=True)
class Answer:
    """A row of the table."""

    check: str
    passed: bool
    text: str
    seconds: float


def attempt(title: str, check: Callable[[Trial], str], trial: Trial) -> Answer:
    """Run one check and print its row; a check that needs the results of a failed one fails too."""
    began = time.monotonic()
    try:
        passed, text = True, check(trial)
    except (CheckFailed, OSError, KeyError) as error:
        passed, text = False, f"{type(error).__name__}: {error}"
    answer = Answer(title, passed, text, round(time.monotonic() - began, 1))
    print(f"{'pass' if passed else 'FAIL'}  {title} ({answer.seconds:.0f} s): {text}", flush=True)
    return answer


def main() -> int:
    """Run all checks and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--network", choices=tuple(SIZES), default="resnet50", help="what is timed beside Keras's fit")
    parser.add_argument("--out", type=Path, default=Path("gpu-check.json"), help="the file to send home")
    options = parser.parse_args()
    on_gpu = options.device == "gpu"
    with tempfile.TemporaryDirectory(prefix="hpcdl-gpu-check-") as name:
        trial = Trial(Path(name), on_gpu, options.network)
        found = json.loads(trial.run([sys.executable, "-c", DEVICES]).splitlines()[-1])
        trial.gpus = found["gpus"] if on_gpu else []
        if on_gpu and not trial.gpus:
            print(f"no GPU: TensorFlow sees none on this node; nothing was tried (exit code {NO_GPU})")
            return NO_GPU
        trial.num_ranks = min(max(len(trial.gpus), 2), MOST_RANKS)
        if on_gpu:
            print(f"{len(trial.gpus)} GPU(s): {trial.gpus[0].get('device_name', 'of a kind without a name')}")
        answers = [attempt(title, check, trial) for title, check in CHECKS.items()]
        document = {
            "schema": "hpcdl.gpu-check/1", "at": now_text()[:10], **found, "gpus": list(trial.gpus),
            "ranks": trial.num_ranks, "checks": [asdict(answer) for answer in answers], "notes": trial.notes,
        }  # fmt: skip
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    failed = sum(not answer.passed for answer in answers)
    print(f"{'pass' if not failed else f'{failed} of {len(CHECKS)} checks fail'}; {options.out} has the numbers")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
