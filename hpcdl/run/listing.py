"""The checkpoints of a run, each looked at: how old and large it is, and whether it is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.checkpoint.facts import Facts, ScriptFacts, kind_for
from hpcdl.checkpoint.folders import FOLDER, MANIFEST, folder_of, list_checkpoints, verify
from hpcdl.checkpoint.memory import LEVEL, check_copy, copies_in, folder_of_copies, names_of, steps_in_folder
from hpcdl.checkpoint.parity import check_parity
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.storage.files import read_json
from hpcdl.run.rundir import CONFIG_FILE, read
from hpcdl.strategies.table import STRATEGIES

FILE_SYSTEM = "file system"
_MOST_EPOCHS = 2**53


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint:
    """One checkpoint: `epoch` is None where nothing tells it, `problem` is empty where every digest fits."""

    step: int
    epoch: float | None
    age_seconds: float
    bytes: int
    level: str
    path: Path
    problem: str

    @property
    def whole(self) -> bool:
        """Whether a run can go on from it."""
        return not self.problem


def listed(run_dir: Path) -> list[ListedCheckpoint]:
    """The checkpoints in `run_dir`, newest first, every file read and held against its digest.

    UsageError where `run_dir` is not a run.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir() and not (run_dir / CONFIG_FILE).is_file():
        raise UsageError(
            f"{run_dir} is not a run: it holds neither {CONFIG_FILE} nor {FOLDER}/; `hpcdl runs` lists what there is"
        )
    kind = _kind_of(run_dir)
    found = [_look_at(folder_of(folder, step), step, kind) for step in list_checkpoints(folder)]
    near = folder_of_copies(run_dir)
    copies = [_look_at_copies(near, step) for step in steps_in_folder(near)] if near else []
    return [item for item in (*copies, *found) if item is not None]


def _kind_of(run_dir: Path) -> type[Facts] | None:
    """What a run needs to go on, by its run.toml; None where that is missing or damaged, which others tell of."""
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


def _look_at(folder: Path, step: int, kind: type[Facts] | None) -> ListedCheckpoint | None:
    """A checkpoint on the file system."""

    def facts() -> dict[str, Any]:
        verify(folder, kind)
        found: dict[str, Any] = read_json(folder / MANIFEST)["facts"]
        return found

    return _listed(folder, "*", step, FILE_SYSTEM, facts)


def _look_at_copies(folder: Path, step: int) -> ListedCheckpoint | None:
    """What this node's memory holds of a step of a run that goes on."""
    names = copies_in(folder, step)

    def facts() -> dict[str, Any]:
        documents = [check_copy(folder, step, rank) for rank in names]
        check_parity(folder, names_of(step))
        found: dict[str, Any] = documents[0]["facts"]
        return found

    return _listed(folder, names_of(step), step, LEVEL, facts)


def _listed(
    folder: Path, names: str, step: int, level: str, facts_of: Callable[[], Mapping[str, Any]]
) -> ListedCheckpoint | None:
    """`facts_of` raises CorruptError. None where a run that goes on has removed the files meanwhile."""
    problem, epoch = "", None
    try:
        epoch = _epoch(step, facts_of())
    except CorruptError as error:
        problem = str(error)
    except (FileNotFoundError, IndexError):
        return None
    try:
        files = [path.stat() for path in folder.glob(names) if path.is_file()] if folder.is_dir() else []
        written_at = max((status.st_mtime for status in files), default=folder.lstat().st_mtime)
    except FileNotFoundError:
        return None
    if level == LEVEL and not files:
        return None
    return ListedCheckpoint(
        step=step,
        epoch=epoch,
        age_seconds=round(max(0.0, time.time() - written_at), 3),
        bytes=sum(status.st_size for status in files),
        level=level,
        path=folder,
        problem=problem,
    )


def _epoch(step: int, facts: Mapping[str, Any]) -> float | None:
    """Epochs done: of `hpcdl train` by its steps, of a script as its hpcdl.State counts them."""
    if "steps_per_epoch" in facts:
        return round(step / int(facts["steps_per_epoch"]), 4)
    counted = facts.get("values", {}).get("epoch")
    return float(counted) if isinstance(counted, (int, float)) and abs(counted) < _MOST_EPOCHS else None


def require_whole(found: list[ListedCheckpoint]) -> None:
    """CorruptError names every checkpoint that is damaged, and what a run does about it."""
    damaged = [item for item in found if not item.whole]
    if not damaged:
        return
    rest = [item.step for item in found if item.whole]
    remedy = f"--resume continues after step {rest[0]}" if rest else "none is left to continue from"
    raise CorruptError(f"{'; '.join(item.problem for item in damaged)}; {remedy}")
