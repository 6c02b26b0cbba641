"""What is kept of a study beside its page in docs/: the raw records, without this machine's paths."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

RAW = ("study.json", "jobs.json", "record.json", "run.toml", "train.toml", "metrics.jsonl")


def keep(study: Path, page: Path, hidden: Sequence[Path]) -> None:
    """Put the records of `study` into `page`/study in place of what is there; `hidden` folders become a dot."""
    for name in ("study", "report"):
        shutil.rmtree(page / name, ignore_errors=True)
    for path in study.rglob("*"):
        if path.name in RAW:
            target = page / "study" / path.relative_to(study)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text()
            for folder in hidden:
                text = text.replace(str(folder), ".")
            target.write_text(text)
