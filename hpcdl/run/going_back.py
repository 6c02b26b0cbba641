"""Which checkpoint a run goes on from: the newest, or the one of `--from-step`; and how to go back, as one types it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hpcdl.checkpoint.facts import Facts
from hpcdl.checkpoint.folders import FOLDER, folder_of, list_checkpoints, newest_valid, verify
from hpcdl.config.schema import InterruptionConfig, TrainConfig
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.paths import typed

SAFE_RATE = 0.01
"""Whoever diverged with more than ten times this is advised to try this."""


def check_going_back(run_dir: Path, limits: InterruptionConfig) -> None:
    """UsageError, or CorruptError, where the run in `run_dir` cannot go on from --from-step."""
    step = limits.from_step
    if step is None:
        return
    if not limits.resume:
        raise UsageError(f"--from-step {step}: it says from which step --resume resumes; add --resume")
    if limits.elastic:
        raise UsageError(
            f"--from-step {step}: not with --elastic, which always continues from the newest checkpoint; go back with "
            "--no-elastic, and on with --elastic once it has saved"
        )
    kept = list_checkpoints(run_dir / FOLDER)
    if step not in kept:
        held = f"those of steps {', '.join(map(str, reversed(kept)))}" if kept else "none"
        raise UsageError(f"--from-step {step}: of its checkpoints {run_dir} keeps {held}; --from-scratch starts again")
    try:
        verify(folder_of(run_dir / FOLDER, step))
    except CorruptError as error:
        raise CorruptError(
            f"--from-step {step}: {error}; name another step ({typed('checkpoints', run_dir)})"
        ) from error


def step_to_resume(
    run_dir: Path, from_step: int | None, warnings: list[str], kind: type[Facts] | None = None
) -> int | None:
    """The step of `from_step`, by default of the newest checkpoint that is whole; None for the start."""
    return newest_valid(run_dir, warnings, kind) if from_step is None else from_step


def _from(step: int) -> list[str]:
    return ["--from-step", str(step)] if step else ["--from-scratch"]


def way_back(run_dir: Path, config: TrainConfig, sound_step: int) -> str:
    """The command that goes on from before a run's numbers exploded; they were sound after `sound_step` steps."""
    step = next((step for step in list_checkpoints(run_dir / FOLDER) if step <= sound_step), 0)
    rate = min(config.optimizer.learning_rate / 10, SAFE_RATE)
    words = ["hpcdl", "train", "--resume", "--run-dir", str(run_dir), *_from(step)]
    words += ["--learning-rate", f"{rate:.6g}", "--allow", "learning-rate"]
    words += ["--no-elastic"] if config.checkpoint.elastic else []
    return f"go on from {f'step {step}' if step else 'the start'} with {shlex.join(words)}"


def script_way_back(run_dir: Path, words: Sequence[str]) -> str:
    """The same of the script and its arguments, `words`: of its losses nothing is known, so it is one checkpoint."""
    kept = list_checkpoints(run_dir / FOLDER)
    if not kept:
        return "lower the learning rate in the script"
    line = ["hpcdl", "run", "--resume", "--run-dir", str(run_dir), *_from(kept[1] if len(kept) > 1 else 0)]
    return (
        f"--resume continues from step {kept[0]}; lower the learning rate in the script, and where it fails again go "
        f"back with {shlex.join([*line, *words])}"
    )
