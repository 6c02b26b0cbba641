"""Whether hpcdl works on the GPUs of this node, in about two minutes: pass, or what fails.

    python benchmarks/gpu_check.py [--device gpu|cpu]

Exit codes: 0 everything passes, 1 something fails, 77 there is no GPU here and nothing was tried. `--device cpu` goes
the same way on two ranks without a GPU, which tries this program, not GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.cluster.environment import placement
from hpcdl.core.records import read_record

NO_GPU = 77
NOTES_VARIABLE = "GPU_CHECK_NOTES"
TIMEOUT_S = 300
MOST_RANKS = 4
STEPS, BATCH_SIZE = 10, 32
NEAR = 0.02
"""Of the largest element of a tensor: GPUs multiply float32 with 10 bits (TF32) unless they are told otherwise."""
DEVICES = """
import json, tensorflow as tf
print(json.dumps([tf.config.experimental.get_device_details(one) for one in tf.config.list_physical_devices("GPU")]))
"""
COMPARE = """
import sys, numpy, keras
first, second = (keras.models.load_model(path).get_weights() for path in sys.argv[1:])
print(max(abs(a - b).max() / max(abs(b).max(), 1e-6) for a, b in zip(first, second)))
"""


class CheckFailed(Exception):
    """What a site should read about."""


@dataclass
class Trial:
    """What the checks share: where they write, how many GPUs there are, and whether GPUs are meant at all."""

    folder: Path
    on_gpu: bool
    num_ranks: int = 2
    gpus: Sequence[dict[str, Any]] = ()
    rates: dict[str, float] = field(default_factory=dict)

    def train(self, name: str, *words: str, hidden: bool = False) -> Path:
        """A short training; its run directory. `hidden`: on the CPU, whatever is there."""
        run_dir = self.folder / name
        line = [
            "train", "--model", f"{__file__}:build", "--data", "synthetic:32x32x3:10", "--steps", str(STEPS),
            "--learning-rate", "0.01", "--profile", "none", "--run-dir", str(run_dir), *words,
        ]  # fmt: skip
        notes = self.folder / f"{name}.notes"
        notes.mkdir()
        run([sys.executable, "-m", "hpcdl", *line], {NOTES_VARIABLE: str(notes)}, hidden=hidden or not self.on_gpu)
        self.rates[name] = read_record(run_dir).images_per_second
        return run_dir

    def notes(self, name: str) -> list[dict[str, str]]:
        """What each rank of a training wrote down of its device."""
        return [json.loads(path.read_text()) for path in sorted((self.folder / f"{name}.notes").iterdir())]


def run(line: Sequence[str], variables: dict[str, str], *, hidden: bool) -> str:
    """What a command prints; CheckFailed has its last line where it fails."""
    environment = {**os.environ, **variables, **({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})}
    try:
        finished = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"did not end in {TIMEOUT_S} s: {' '.join(line)}") from None
    if finished.returncode:
        said = (finished.stderr.strip() or finished.stdout.strip() or "no word").splitlines()[-1]
        raise CheckFailed(f"{said} (exit code {finished.returncode}; {' '.join(line)})")
    return finished.stdout


def build(num_classes: int, input_shape: tuple[int, ...]) -> Any:
    """A small network for `hpcdl train`; each rank writes down where TensorFlow computes."""
    import keras
    import tensorflow as tf

    place = placement()
    folder = os.environ.get(NOTES_VARIABLE)
    if place is not None and folder:
        where = {
            "device": (tf.ones((8, 8)) @ tf.ones((8, 8))).device,
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }
        (Path(folder) / f"{place.rank}.json").write_text(json.dumps(where))
    layers = keras.layers
    return keras.Sequential([
        keras.Input(input_shape), layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D(),
        layers.Conv2D(64, 3, activation="relu"), layers.GlobalAveragePooling2D(), layers.Dense(num_classes),
    ])  # fmt: skip


def one_rank(trial: Trial) -> str:
    """One rank trains, where it should."""
    trial.train("single", "--strategy", "single", "--batch-size", str(trial.num_ranks * BATCH_SIZE))
    return f"{trial.rates['single']:.0f} images/s"


def own_gpu(trial: Trial) -> str:
    """Each rank computes on a GPU of its own."""
    trial.train("ring", "--strategy", "ring", "--ranks", str(trial.num_ranks), "--batch-size", str(BATCH_SIZE))
    notes = trial.notes("ring")
    wanted = "GPU" if trial.on_gpu else "CPU"
    astray = [note["device"] for note in notes if f"device:{wanted}" not in note["device"]]
    if astray or len(notes) != trial.num_ranks:
        raise CheckFailed(f"{len(notes)} of {trial.num_ranks} ranks told their device; not on a {wanted}: {astray}")
    visible = [note["visible"] for note in notes]
    if len(trial.gpus) > 1 and len(set(visible)) < min(len(trial.gpus), trial.num_ranks):
        raise CheckFailed(f"ranks share GPUs: CUDA_VISIBLE_DEVICES is {visible} by rank")
    return f"{trial.num_ranks} ranks over MPI" + (f", CUDA_VISIBLE_DEVICES {visible}" if trial.on_gpu else "")


def same_weights(trial: Trial) -> str:
    """Ranks reach what one rank reaches with the same global batch."""
    models = [str(trial.folder / name / "model.keras") for name in ("ring", "single")]
    apart = float(run([sys.executable, "-c", COMPARE, *models], {}, hidden=True))
    if not apart <= NEAR:
        raise CheckFailed(
            f"weights of {trial.num_ranks} ranks and of one are {apart:.2g} of the largest apart ({NEAR:g} allowed)"
        )
    return f"{apart:.1g} of a tensor's largest element apart"


def faster(trial: Trial) -> str:
    """A GPU is worth having."""
    if not trial.on_gpu:
        return "not tried without a GPU"
    trial.train("cpu", "--strategy", "single", "--batch-size", str(trial.num_ranks * BATCH_SIZE), hidden=True)
    gain = trial.rates["single"] / trial.rates["cpu"]
    if gain < 1:
        raise CheckFailed(f"the GPU does {trial.rates['single']:.0f} images/s, the CPU {trial.rates['cpu']:.0f}")
    return f"{gain:.1f} times the CPU's images/s"


def tensorflows_ring(trial: Trial) -> str:
    """TensorFlow's own ring, over NCCL where there are GPUs."""
    if trial.on_gpu and len(trial.gpus) < 2:
        return "not tried: NCCL needs a GPU for each rank, and there is one"
    words = ("--strategy", "grpc-ring", "--allow-grpc", "--ranks", str(trial.num_ranks))
    trial.train("grpc-ring", *words, "--batch-size", str(BATCH_SIZE))
    return f"{trial.rates['grpc-ring']:.0f} images/s, over MPI {trial.rates['ring']:.0f}"


CHECKS: dict[str, Callable[[Trial], str]] = {
    "one rank": one_rank,
    "a GPU for each rank": own_gpu,
    "same weights": same_weights,
    "faster than the CPU": faster,
    "grpc-ring": tensorflows_ring,
}


def main() -> int:
    """Try all; a check that needs what another has left fails with it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    on_gpu = parser.parse_args().device == "gpu"
    gpus: list[dict[str, Any]] = []
    if on_gpu:
        gpus = json.loads(run([sys.executable, "-c", DEVICES], {"TF_CPP_MIN_LOG_LEVEL": "3"}, hidden=False))
        if not gpus:
            print(f"no GPU: TensorFlow sees none on this node; nothing was tried (exit code {NO_GPU})")
            return NO_GPU
        print(f"{len(gpus)} GPU(s): {gpus[0].get('device_name', 'of a kind that TensorFlow does not name')}")
    failed = 0
    with tempfile.TemporaryDirectory(prefix="hpcdl-gpu-check-") as name:
        trial = Trial(Path(name), on_gpu, num_ranks=min(max(len(gpus), 2), MOST_RANKS), gpus=gpus)
        for title, check in CHECKS.items():
            try:
                print(f"pass  {title}: {check(trial)}", flush=True)
            except (CheckFailed, OSError, KeyError) as error:
                failed += 1
                print(f"FAIL  {title}: {error}", flush=True)
    print("pass" if not failed else f"{failed} of {len(CHECKS)} checks fail")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
