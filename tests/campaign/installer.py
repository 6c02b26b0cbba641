"""`scripts/installer COMMAND` of the current folder, with all parts of an installation except what pip installs."""

from __future__ import annotations

import json
import runpy
import shutil
import sys
from typing import Any

sys.path.insert(0, "scripts/installer")
build = __import__("build")


def filled(plan: Any) -> int:
    """As `build.fill`: create an environment, the share folder, programs, the receipt; then open it to all users."""
    scratch = plan.tree / ".scratch"
    build.copy_sources(scratch / "source")
    build.run([sys.executable, "-m", "venv", "--without-pip", str(plan.tree / "venv")], "making the environment")
    shutil.copytree(build.CHECKOUT / "share" / "hpcdl", plan.tree / "share" / "hpcdl")
    build.write_programs(plan.tree, own_mpi=False)
    (plan.tree / build.RECEIPT).write_text(json.dumps({"version": plan.version}))
    shutil.rmtree(scratch)
    build.open_to_everybody(plan.tree)
    return 0


build.fill = filled
runpy.run_path("scripts/installer", run_name="__main__")
