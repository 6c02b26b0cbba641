"""A user's folder on the lab's shared file system, with this checkout's hpcdl."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.cluster.status import RankStatus, read_statuses
from tests.conftest import ROOT, Finished
from tests.lab.hosts import LOGIN, wait_until
from tests.lab.slurm import SlurmLab


@dataclass(frozen=True)
class Desk:
    """Commands run in `folder`, by `python`, with `variables` on top of a login shell's."""

    lab: SlurmLab
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def hpcdl(self, *words: str | Path, host: str = LOGIN, timeout_s: float = 300.0) -> Finished:
        """Run `hpcdl WORDS` on `host`."""
        return self.lab.run(self.line(*words), host=host, cwd=self.folder, env=self.environment, timeout_s=timeout_s)

    @property
    def environment(self) -> dict[str, str]:
        """Settings and caches of this folder alone."""
        return {
            "PYTHONPATH": str(ROOT),
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "HPCDL_SITE_CONFIG": str(self.folder / "site.toml"),
            **self.variables,
        }

    def line(self, *words: str | Path) -> list[str | Path]:
        """Return the command line of `hpcdl WORDS`."""
        return [self.python, "-m", "hpcdl", *words]

    def submit(self, *words: str | Path, run: str) -> int:
        """Return the job number of `hpcdl submit WORDS --run-dir RUN`; in WORDS, `--` precedes the words of `train`."""
        split = words.index("--")
        before, after = words[:split], words[split + 1 :]
        finished = self.hpcdl("submit", *before, "--", "train", *after, "--run-dir", run)
        assert finished.code == 0, finished.err
        return int(finished.out.partition(".")[0])

    def view(self, number: int) -> dict[str, Any]:
        """Return what `hpcdl jobs NUMBER` reports."""
        finished = self.hpcdl("jobs", str(number), "--json")
        assert finished.code == 0, finished.err
        view: dict[str, Any] = finished.json()["jobs"][0]
        return view

    def log(self, number: int) -> str:
        """Return what the job has printed."""
        return "\n".join(path.read_text() for path in self.folder.rglob(f"log-{number}.*txt"))

    def record(self, run: str) -> dict[str, Any]:
        """Return the run's record."""
        record: dict[str, Any] = json.loads((self.folder / run / "record.json").read_text())
        return record

    def status(self, run: str, rank: int) -> RankStatus:
        """Return the status of a rank."""
        return read_statuses(self.folder / run / "ranks")[rank]

    def checkpoints(self, run: str) -> list[str]:
        """Return the names of the run's complete checkpoints."""
        folder = self.folder / run / "checkpoints"
        return sorted(path.name for path in folder.glob("step-*") if not path.suffix)

    def events(self, run: str, kind: str) -> list[dict[str, Any]]:
        """Return the run's events of one kind."""
        path = self.folder / run / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be incomplete
        return [event for event in map(json.loads, lines) if event["kind"] == kind]

    def wait_for_steps(self, run: str, timeout_s: float = 240.0) -> None:
        """Return when the journal has a step of the run."""
        wait_until(lambda: bool(self.events(run, "step")), f"{run} makes steps", timeout_s)
