"""The checkpoints of a run: the age, size and integrity of each, and the one from which a run continues."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.folders import (
    FOLDER,
    MANIFEST,
    Facts,
    ScriptFacts,
    folder_of,
    kind_for,
    list_checkpoints,
    newest_valid,
    verify,
)
from hpcdl.checkpoint.memory import LEVEL, check_copy, copies_in, folder_of_copies, names_of, steps_in_folder
from hpcdl.checkpoint.parity import check_parity
from hpcdl.config.schema import InterruptionConfig, ScriptConfig, TrainConfig
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.paths import typed
from hpcdl.core.records.run_record import FINISHED, state_of
from hpcdl.core.storage.files import read_json
from hpcdl.data.format.dataset import PREFIX
from hpcdl.run.rundir import CONFIG_FILE, SCRIPT, check_trusted, read, read_as
from hpcdl.strategies.table import STRATEGIES

FILE_SYSTEM = "file system"
_MOST_EPOCHS = 2**53  # the number up to which a float counts exactly


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint: `epoch` is None if unknown, `problem` is empty if every digest matches."""

    step: int
    epoch: float | None
    age_seconds: float
    bytes: int
    level: str
    path: Path
    problem: str

    @property
    def whole(self) -> bool:
        """Whether a run can continue from it."""
        return not self.problem


def listed(run_dir: Path) -> list[ListedCheckpoint]:
    """Return the checkpoints in `run_dir`, newest first, after checking every file against its digest.

    Raises UsageError if `run_dir` is not a run.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir() and not (run_dir / CONFIG_FILE).is_file():
        raise UsageError(
            f"{run_dir} is not a run: it holds neither {CONFIG_FILE} nor {FOLDER}/; `hpcdl runs` lists what there is"
        )
    kind = _kind_of(run_dir)
    saved = [_look_at(folder_of(folder, step), step, kind) for step in list_checkpoints(folder)]
    near = folder_of_copies(run_dir)
    copies = [_look_at_copies(near, step) for step in steps_in_folder(near)] if near else []
    return [checkpoint for checkpoint in (*copies, *saved) if checkpoint is not None]


def _kind_of(run_dir: Path) -> type[Facts] | None:
    """Return the facts that a run needs to continue, by its run.toml; None if that is missing or damaged."""
    if not (run_dir / CONFIG_FILE).is_file():
        return None
    try:
        strategy = read(run_dir)[0].config.exchange.strategy
    except UsageError:
        return ScriptFacts  # a run of `hpcdl run`
    except (CorruptError, OSError):
        return None
    info = STRATEGIES.get(strategy)
    return None if info is None else kind_for(synchronous=info.features.synchronous)


def ways_on(run_dir: Path) -> list[str]:
    """Return the commands that continue a run, and that evaluate a training.

    None if its run.toml does not tell, or if its data are not found from this folder. Another user's is not continued.
    """
    kind, is_finished = _kind_of(run_dir), state_of(run_dir) == FINISHED
    if kind is None or (kind is ScriptFacts and is_finished):
        return []
    if kind is ScriptFacts:
        facts = read_as(ScriptConfig, run_dir)[1]
        return [typed("run", "--resume", "--run-dir", run_dir, facts[SCRIPT], *facts.get("arguments", ()))]
    data = read(run_dir)[0].config.data.data
    if not data.startswith(PREFIX) and not Path(data).expanduser().is_dir():
        return []
    evaluated = typed("evaluate", run_dir, "--data", data)
    try:
        check_trusted(run_dir, trust=False)
    except UsageError:
        return [f"{evaluated} --trust"]
    return [evaluated] if is_finished else [typed("train", "--resume", "--run-dir", run_dir), evaluated]


def _look_at(folder: Path, step: int, kind: type[Facts] | None) -> ListedCheckpoint | None:
    """Return a checkpoint on the file system."""

    def facts() -> dict[str, Any]:
        verify(folder, kind)
        manifest_facts: dict[str, Any] = read_json(folder / MANIFEST)["facts"]
        return manifest_facts

    return _listed(folder, "*", step, FILE_SYSTEM, facts)


def _look_at_copies(folder: Path, step: int) -> ListedCheckpoint | None:
    """Return the copies of a step in this node's memory, for a run that continues by itself."""
    names = copies_in(folder, step)

    def facts() -> dict[str, Any]:
        documents = [check_copy(folder, step, rank) for rank in names]
        check_parity(folder, names_of(step))
        first_facts: dict[str, Any] = documents[0]["facts"]
        return first_facts

    return _listed(folder, names_of(step), step, LEVEL, facts)


def _listed(
    folder: Path, names: str, step: int, level: str, facts_of: Callable[[], Mapping[str, Any]]
) -> ListedCheckpoint | None:
    """Return the listed checkpoint; `facts_of` may raise CorruptError. None if a live run removed the files."""
    problem, epoch = "", None
    try:
        epoch = _epoch(step, facts_of())
    except CorruptError as error:
        problem = str(error)
    # IndexError: the last copy of this step was removed meanwhile.
    except (FileNotFoundError, IndexError):
        return None
    try:
        files = [path.stat() for path in folder.glob(names) if path.is_file()] if folder.is_dir() else []
        written_at = max((status.st_mtime for status in files), default=folder.lstat().st_mtime)
    except FileNotFoundError:
        return None
    if level == LEVEL and not files:  # the run has just replaced this copy
        return None
    return ListedCheckpoint(
        step=step,
        epoch=epoch,
        age_seconds=round(max(0.0, time.time() - written_at), 3),  # the file server's clock may be ahead
        bytes=sum(status.st_size for status in files),
        level=level,
        path=folder,
        problem=problem,
    )


def _epoch(step: int, facts: Mapping[str, Any]) -> float | None:
    """Return the completed epochs: from the steps of `hpcdl train`, or from the hpcdl.State of a script."""
    if "steps_per_epoch" in facts:
        return round(step / int(facts["steps_per_epoch"]), 4)
    counted = facts.get("values", {}).get("epoch")
    return float(counted) if isinstance(counted, (int, float)) and abs(counted) < _MOST_EPOCHS else None


def require_whole(checkpoints: list[ListedCheckpoint]) -> None:
    """Raise CorruptError naming every damaged checkpoint, and from where a run would continue."""
    damaged = [checkpoint for checkpoint in checkpoints if not checkpoint.whole]
    if not damaged:
        return
    whole_steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.whole]
    remedy = f"--resume continues after step {whole_steps[0]}" if whole_steps else "none is left to continue from"
    raise CorruptError(f"{'; '.join(checkpoint.problem for checkpoint in damaged)}; {remedy}")


SAFE_RATE = 0.01
"""Highest learning rate suggested after a divergence; a run that used more than ten times this gets it."""


def check_going_back(run_dir: Path, limits: InterruptionConfig) -> None:
    """Raise UsageError or CorruptError if the run in `run_dir` cannot continue from --from-step."""
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
    """Return `from_step`, or by default the step of the newest intact checkpoint; None to begin at the start."""
    return newest_valid(run_dir, warnings, kind) if from_step is None else from_step


def _from(step: int) -> list[str]:
    return ["--from-step", str(step)] if step else ["--from-scratch"]


def way_back(run_dir: Path, config: TrainConfig, sound_step: int) -> str:
    """Return the command that resumes before a run's numbers exploded; they were sound after `sound_step` steps."""
    step = next((step for step in list_checkpoints(run_dir / FOLDER) if step <= sound_step), 0)
    rate = min(config.optimizer.learning_rate / 10, SAFE_RATE)
    command = ["hpcdl", "train", "--resume", "--run-dir", str(run_dir), *_from(step)]
    command += ["--learning-rate", f"{rate:.6g}", "--allow", "learning-rate"]
    command += ["--no-elastic"] if config.checkpoint.elastic else []
    return f"continue from {f'step {step}' if step else 'the start'} with {shlex.join(command)}"


def script_way_back(run_dir: Path, words: Sequence[str]) -> str:
    """Return the same for a script with arguments `words`; its losses are unknown, so go back by one checkpoint."""
    kept = list_checkpoints(run_dir / FOLDER)
    if not kept:
        return "lower the learning rate in the script"
    line = ["hpcdl", "run", "--resume", "--run-dir", str(run_dir), *_from(kept[1] if len(kept) > 1 else 0)]
    return (
        f"--resume continues from step {kept[0]}; lower the learning rate in the script, and where it fails again go "
        f"back with {shlex.join([*line, *words])}"
    )
