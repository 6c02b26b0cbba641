"""Makes docs/example-report-two-cores anew: LeNet trained on one core and on two of this machine, and its report.

`python -m tests.study.two_cores FOLDER`; FOLDER takes data and study. Called again after an interruption it goes on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import DIGITS, ROOT
from tests.study.kept import keep

PAGE = ROOT / "docs" / "example-report-two-cores"
MACHINE = "two cores of a virtual machine"


def hpcdl(folder: Path, *words: str | Path) -> None:
    """Run hpcdl in `folder`, on nobody's settings; CalledProcessError where it fails."""
    own = {"PYTHONPATH": str(ROOT), "HPCDL_MACHINE": MACHINE, "HPCDL_SITE_CONFIG": str(folder / "site.toml")}
    own |= {"XDG_CACHE_HOME": str(folder / "cache"), "XDG_CONFIG_HOME": str(folder / "config")}
    subprocess.run([sys.executable, "-m", "hpcdl", *words], cwd=folder, env={**os.environ, **own}, check=True)


def main() -> None:
    """Do it."""
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "digits-shards").exists():
        split = ["--image-size", "28", "--split", "train=0.8,val=0.2", "--seed", "1"]
        hpcdl(folder, "shard", DIGITS, "digits-shards", *split)
    resume = ["--resume"] if (folder / "two-cores").exists() else []
    hpcdl(folder, "sweep", PAGE / "study.toml", "--out", "two-cores", *resume)
    keep(folder / "two-cores", PAGE, [folder, ROOT])
    hpcdl(folder, "report", PAGE / "study", "--out", PAGE / "report")


if __name__ == "__main__":
    main()
