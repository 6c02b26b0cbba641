"""Python and its packages, read from their metadata: nothing heavy is imported."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys

from hpcdl.doctor.finding import Finding, Subject, failure, ok

OLDEST_PYTHON = (3, 11)
OLDEST = {"tensorflow": (2, 16), "keras": (3, 0), "numpy": (1, 26), "h5py": (3, 11), "mpi4py": (4, 1)}
"""Oldest versions that hpcdl works with. TensorFlow 2.16 is the first whose Keras is Keras 3."""
_ALSO_AS = {"tensorflow": ("tensorflow-cpu", "tensorflow-intel", "tf-nightly")}


def check(subject: Subject) -> list[Finding]:
    """Versions of Python and of each package."""
    found = []
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        found.append(failure("python", f"Python {version} at {sys.executable}", "use Python 3.11 or newer"))
    else:
        found.append(ok("python", f"Python {version} at {sys.executable}"))
    versions = {name: _version(name) for name in OLDEST}
    for name, oldest in OLDEST.items():
        wanted = ".".join(str(part) for part in oldest)
        remedy = f"pip install '{name}>={wanted}' into {sys.prefix}, or load the site's hpcdl module"
        if not versions[name]:
            found.append(failure("python", f"{name} is not installed", remedy))
        elif _numbers(versions[name]) < oldest:
            found.append(failure("python", f"{name} {versions[name]} is older than {wanted}", remedy))
    if subject.environment.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        text = "TF_USE_LEGACY_KERAS is set: TensorFlow would use Keras 2"
        found.append(failure("python", text, "unset TF_USE_LEGACY_KERAS"))
    if all(finding.level == "ok" for finding in found):
        found.append(ok("python", ", ".join(f"{name} {version}" for name, version in versions.items())))
    return found


def _version(name: str) -> str:
    for candidate in (name, *_ALSO_AS.get(name, ())):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
