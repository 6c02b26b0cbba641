"""The environment module: is what it points to there, and is what it was built on loaded."""

from __future__ import annotations

import sys
from pathlib import Path

from hpcdl.core.errors import CorruptError
from hpcdl.core.files import read_json
from hpcdl.doctor.finding import Finding, Subject, failure, ok, warning

CHECK = "module"


def check(subject: Subject) -> list[Finding]:
    """`$HPCDL_ROOT` and its receipt, against the modules that are loaded and the Python that runs."""
    named = subject.environment.get("HPCDL_ROOT")
    if not named:
        return [ok(CHECK, f"no module is loaded; hpcdl runs from {sys.prefix}")]
    root = Path(named)
    if not root.is_dir():
        return [failure(CHECK, f"HPCDL_ROOT={root} does not exist", "module unload hpcdl; module load hpcdl")]
    try:
        receipt = read_json(root / "install.json")
    except (OSError, CorruptError):
        return [failure(CHECK, f"{root} holds no install.json: the installation is not whole", "tell the site's staff")]
    needed = str(receipt.get("mpi_module") or "")
    loaded = subject.environment.get("LOADEDMODULES", "").split(":")
    if needed and not any(name == needed or name.startswith(f"{needed}/") for name in loaded):
        text = f"the module {needed}, which hpcdl was built on, is not loaded"
        return [failure(CHECK, text, f"module load {needed}, or module reload hpcdl")]
    if not Path(sys.prefix).is_relative_to(root):
        text = f"the module is {root}, but this hpcdl runs from {sys.prefix}"
        return [warning(CHECK, text, "deactivate the virtual environment, or module unload hpcdl")]
    return [ok(CHECK, f"hpcdl {receipt.get('version', '?')} in {root}")]
