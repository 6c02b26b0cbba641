"""The installation and its settings: Python and its packages, the environment module, the layers of settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from hpcdl.cluster.own_env import base_of
from hpcdl.config.commands import load_submit
from hpcdl.config.load import MACHINE_VARIABLE, Layer, load, machine_in_force, site_rules, standard_layers
from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import CorruptError, UsageError
from hpcdl.core.paths import other_backend, site_config_file, user_config_folder
from hpcdl.core.storage.files import read_json, read_toml
from hpcdl.doctor.table import Finding, Subject, failure, ok, warning

OLDEST_PYTHON = (3, 11)
OLDEST = {"tensorflow": (2, 16), "keras": (3, 0), "numpy": (1, 26), "h5py": (3, 11), "mpi4py": (4, 1)}
"""Oldest supported versions. TensorFlow 2.16 is the first whose Keras is Keras 3."""
_ALSO_AS = {"tensorflow": ("tensorflow-cpu", "tensorflow-intel", "tf-nightly")}
_NEEDED = {"model": "lenet", "data": "synthetic:cifar10"}
"""Placeholders for required settings of a command line."""


def check_python(subject: Subject) -> list[Finding]:
    """Check the versions of Python and of each package."""
    findings = []
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        findings.append(failure(f"Python {version} at {sys.executable}", "use Python 3.11 or newer"))
    else:
        findings.append(ok(f"Python {version} at {sys.executable}"))
    versions = {name: installed_version(name) for name in OLDEST}
    for name, oldest in OLDEST.items():
        wanted = ".".join(str(part) for part in oldest)
        remedy = f"pip install '{name}>={wanted}' into {sys.prefix}, or load the site's hpcdl module"
        if not versions[name]:
            findings.append(failure(f"{name} is not installed", remedy))
        elif _numbers(versions[name]) < oldest:
            findings.append(failure(f"{name} {versions[name]} is older than {wanted}", remedy))
    if subject.environment.get("TF_USE_LEGACY_KERAS", "0").lower() in ("1", "true"):
        text = "TF_USE_LEGACY_KERAS is set: TensorFlow would use Keras 2"
        findings.append(failure(text, "unset TF_USE_LEGACY_KERAS"))
    findings += _hidden()
    backend_problem = other_backend(subject.environment)
    if backend_problem:
        problem, _, remedy = backend_problem.rpartition("; ")
        findings.append(failure(problem, remedy))
    if all(finding.level == "ok" for finding in findings):
        findings.append(ok(", ".join(f"{name} {version}" for name, version in versions.items())))
    return findings


def _hidden() -> list[Finding]:
    """Report packages that Python finds in two versions: the first hides the one that came with hpcdl."""
    findings = []
    for name in OLDEST:
        copies = {copy.version: copy for copy in importlib.metadata.distributions(name=name)}
        if len(copies) > 1:
            first, *other_copies = (f"{version} in {copy.locate_file('')}" for version, copy in copies.items())
            text = f"{name} {first} hides {', '.join(other_copies)}"
            findings.append(
                warning(text, "unset PYTHONPATH, or remove the first; `hpcdl env create` adds packages safely")
            )
    return findings


def installed_version(name: str) -> str:
    """Return the version of a package by its metadata, under any of its names; empty if it is not installed."""
    for candidate in (name, *_ALSO_AS.get(name, ())):
        try:
            return importlib.metadata.version(candidate)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def check_module(subject: Subject) -> list[Finding]:
    """Check `$HPCDL_ROOT` and its install.json against the loaded modules and the running Python."""
    named = subject.environment.get("HPCDL_ROOT")
    base = base_of()
    on = f", on {base}" if base else ""
    if not named:
        return [ok(f"no module is loaded; hpcdl runs from {sys.prefix}{on}")]
    root = Path(named)
    if not root.is_dir():
        return [failure(f"HPCDL_ROOT={root} does not exist", "module unload hpcdl; module load hpcdl")]
    try:
        receipt = read_json(root / "install.json")
    except (OSError, CorruptError):
        return [failure(f"{root} holds no install.json: the installation is not whole", "tell the site's staff")]
    needed = str(receipt.get("mpi_module") or "")
    loaded = subject.environment.get("LOADEDMODULES", "").split(":")
    if needed and not _is_loaded(needed, loaded):
        text = f"the module {needed}, which hpcdl was built on, is not loaded"
        return [failure(text, f"module load {needed}, or module reload hpcdl")]
    if not (base or Path(sys.prefix)).is_relative_to(root):
        text = f"the module is {root}, but this hpcdl runs from {sys.prefix}"
        return [warning(text, "deactivate the virtual environment, or module unload hpcdl")]
    with_packages = f", with your own packages in {sys.prefix}" if base else ""
    return [ok(f"hpcdl {receipt.get('version', '?')} in {root}{with_packages}")]


def check_config(subject: Subject) -> list[Finding]:
    """Check site.toml, the user's config.toml, and the folder for profiles."""
    findings = [*_readable(), *_writable()]
    return findings or [ok(f"site settings {_site()}; your own in {user_config_folder()}")]


def _site() -> str:
    path = site_config_file()
    return str(path) if path.is_file() else f"none ({path} does not exist)"


def _readable() -> list[Finding]:
    findings = []
    for path in (site_config_file(), user_config_folder() / "config.toml"):
        try:
            if path.is_file():
                read_toml(path)
        except UsageError as error:
            findings.append(failure(str(error), f"correct {path}, or move it away"))
    if findings:
        return findings
    try:
        site_rules()
        load(TrainConfig, [Layer(origin="doctor", values=_NEEDED), *standard_layers("train")])
        load_submit({})
    except UsageError as error:
        remedy = "correct the file that the message names"
        findings += [failure(line, remedy) for line in str(error).splitlines()]
    return findings


def _writable() -> list[Finding]:
    folder = user_config_folder()
    # The folder may still have to be made, so its nearest existing parent counts.
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(nearest, os.W_OK | os.X_OK):
        return []
    text = f"{nearest} cannot be written: profiles of `hpcdl tune-threads` cannot be stored"
    return [warning(text, "set XDG_CONFIG_HOME to a folder that you may write to")]


def check_machine(subject: Subject) -> list[Finding]:
    """Check the machine's file: variables with other values here, and modules that a job lacks."""
    try:
        machine = machine_in_force(subject.environment)
    except UsageError as error:
        return [failure(line, "correct the file that the message names") for line in str(error).splitlines()]
    folder = site_config_file().parent / "machines"
    if machine is None:
        return [ok(f"no machine's settings: neither {MACHINE_VARIABLE} nor [site] names a file in {folder}")]
    findings = [
        warning(
            f"{name}={value} is set here, and {machine.path} asks for {machine.environment[name]!r}: yours stays",
            f"unset {name}, where you did not mean it",
        )
        for name, value in machine.set_otherwise(subject.environment).items()
    ]
    loaded = subject.environment.get("LOADEDMODULES", "").split(":")
    missing = [name for name in machine.modules if not _is_loaded(name, loaded)]
    if missing:
        text = f"modules of the machine {machine.name} that are not loaded here: {', '.join(missing)}"
        findings.append(warning(text, f"module load {' '.join(missing)}; job scripts of hpcdl submit load them"))
    summary = f"{len(machine.environment)} variables, {len(machine.modules)} modules"
    return findings or [ok(f"machine {machine.name} ({machine.path}): {summary}")]


def _is_loaded(name: str, loaded: Sequence[str]) -> bool:
    # `module load mpich` loads a default version, which is listed as `mpich/4.2`.
    return any(module == name or module.startswith(f"{name}/") for module in loaded)
