"""Make docs/example-report again: train LeNet on one and two cores of this machine, and write the report.

`python -m tests.study.example FOLDER`; FOLDER receives data and study. A repeated call resumes an interrupted one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import DIGITS, ROOT

PAGE = ROOT / "docs" / "example-report"
MACHINE = "two cores of a virtual machine"
RAW = ("study.json", "record.json", "run.toml", "train.toml", "metrics.jsonl")


def hpcdl(folder: Path, *words: str | Path) -> None:
    """Run hpcdl in `folder` without user or site settings; raises CalledProcessError if it fails."""
    own = {"PYTHONPATH": str(ROOT), "HPCDL_MACHINE": MACHINE, "HPCDL_SITE_CONFIG": str(folder / "site.toml")}
    own |= {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "config")}
    subprocess.run([sys.executable, "-m", "hpcdl", *words], cwd=folder, env={**os.environ, **own}, check=True)


def keep(study: Path, page: Path, hidden: Sequence[Path]) -> None:
    """Replace `page`/study by the records of `study`; paths of `hidden` folders become a dot."""
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


def main() -> None:
    """Make the data, the study and the report."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "digits-shards").exists():
        split = ["--image-size", "28", "--split", "train=0.8,val=0.2", "--seed", "1"]
        hpcdl(folder, "shard", DIGITS, "digits-shards", *split)
    resume = ["--resume"] if (folder / "two-cores").exists() else []
    hpcdl(folder, "sweep", PAGE / "study.toml", "--out", "two-cores", *resume)
    keep(folder / "two-cores", PAGE, [folder, ROOT])
    hpcdl(folder, "report", PAGE / "study", "--out", PAGE / "report", "--format", "terminal,html,csv,json")


if __name__ == "__main__":
    main()
