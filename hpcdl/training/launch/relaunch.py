"""A run that goes on by itself, `--elastic`: where a rank is lost, new ranks start from the newest checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcdl.config.load import Effective, replace
from hpcdl.config.schema import ScriptConfig, TrainConfig
from hpcdl.core.errors import RankError, UsageError
from hpcdl.training.checkpoint.folders import FOLDER, list_checkpoints
from hpcdl.training.checkpoint.local import newest_copy
from hpcdl.training.launch import rundir
from hpcdl.training.loop.journal import FileJournal

TRIES = 3
"""Starts in a row that may be lost without a new checkpoint between them."""


def check_starts_ranks(elastic: bool, launcher: str) -> None:
    """UsageError where ranks are started by somebody else, who alone could start new ones."""
    if elastic:
        raise UsageError(
            f"--elastic: {launcher} has started the ranks, and new ones are its own to start; "
            "leave the start to hpcdl (--ranks N), or --elastic out"
        )


def until_done(
    launch: Callable[[], None],
    run_dir: Path,
    effective: Effective[TrainConfig] | Effective[ScriptConfig],
    facts: Mapping[str, Any],
    say: Callable[[str], None],
) -> None:
    """Call `launch` until it returns; RankError where a rank fails by its own doing, or none of TRIES gets anywhere.

    Between two launches the journal and `say` are told, and run.toml says that the run is resumed. Without --elastic
    `launch` is called once.
    """
    lost_at: list[int] = []
    while True:
        try:
            return launch()
        except RankError as error:
            if not effective.config.checkpoint.elastic or not error.lost:
                raise
            newest = max(next(iter(list_checkpoints(run_dir / FOLDER)), 0), newest_copy(run_dir))
            lost_at = [*(step for step in lost_at if step == newest), newest]
            if len(lost_at) == TRIES:
                text = f"{error}; lost {TRIES} times after step {newest}, the run does not go on by itself"
                raise RankError(text, rank=error.rank, host=error.host, exit_code=error.exit_code) from error
            text = f"{error}; new ranks go on {f'after step {newest}' if newest else 'from the start'}"
        with contextlib.closing(FileJournal(run_dir)) as journal:
            journal.write("message", text=text)
        say(text)
        rundir.create(run_dir, _resumed(effective), facts)


def _resumed(effective: Effective[Any]) -> Effective[Any]:
    return Effective(config=replace(effective.config, resume=True), origins=effective.origins)
