"""Settings of a machine in one place: `machines/NAME.toml` beside site.toml (docs/reference/site.md).

`$HPCDL_MACHINE` names the machine, else `machine` in the table [site] of site.toml. Its tables named like commands lie
over those of site.toml. Its environment is that of `train`, `run` and their ranks; job scripts load its modules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcdl.core.errors import ConfigError, UsageError, suggestion
from hpcdl.core.paths import site_config_file
from hpcdl.core.storage.files import read_toml

MACHINE_VARIABLE = "HPCDL_MACHINE"
COMMANDS = ("train", "run", "submit", "sweep", "search")
"""Commands whose defaults a machine may have."""
_KEYS = ("summary", "sources", "modules", "environment", *COMMANDS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")
_REFUSED = re.compile(r"(LD_.*|PATH|PYTHON.*|HOME|BASH_.*|ENV|IFS|HPCDL_(RANK|SIZE|SITE_CONFIG|SHARE|MACHINE))")
"""Variables that would change what is run, not how: modules set them."""


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """What a machine's file holds; `tables` are defaults by command, `origin` is what messages call the file."""

    name: str
    path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    modules: Sequence[str] = ()
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def origin(self) -> str:
        """The file, as the origin of a setting."""
        return f"machine ({self.path})"

    def set_otherwise(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Its variables that `environment` has with another value, with that value."""
        return {
            name: environment[name]
            for name, value in self.environment.items()
            if name in environment and environment[name] != value
        }


def machine_in_force(environment: Mapping[str, str] = os.environ) -> MachineSettings | None:
    """The settings of the machine that this is; None where nobody names it, or it has no file.

    UsageError where site.toml names a machine without a file; ConfigError with all that is wrong in a file.
    """
    site = site_config_file()
    named = environment.get(MACHINE_VARIABLE, "")
    by_site = "" if named or not site.is_file() else _machine_of(site)
    name = named or by_site
    if not _NAME.fullmatch(name):  # a name for records alone, as "two cores of mine" is
        return None
    path = site.parent / "machines" / f"{name}.toml"
    if path.is_file():
        return read_machine_settings(path)
    if by_site:
        raise UsageError(f"{site}: machine = {name!r}, but there is no {path}; write it, or leave machine out")
    return None


def read_machine_settings(path: Path) -> MachineSettings:
    """The settings in a file; ConfigError with all that is wrong in it."""
    document = read_toml(path)
    problems = [f"{path}: unknown key {key!r}{suggestion(key, _KEYS)}" for key in document if key not in _KEYS]
    tables = {name: document.get(name, {}) for name in ("environment", *COMMANDS)}
    for name, table in tables.items():
        if not isinstance(table, dict):
            problems.append(f"{path}: {name} must be a table; write [{name}], and its keys below")
            tables[name] = {}
    for name, value in tables["environment"].items():
        if not _VARIABLE.fullmatch(name) or _REFUSED.fullmatch(name):
            problems.append(f"{path}: [environment] {name}: not a variable that a machine may set; use a module for it")
        if not isinstance(value, str) or "\n" in value or "\0" in value:
            problems.append(f'{path}: [environment] {name} must be a text of one line: {name} = "1"')
    modules = document.get("modules", [])
    if not isinstance(modules, list) or not all(isinstance(item, str) and _MODULE.fullmatch(item) for item in modules):
        problems.append(f'{path}: modules must be a list of names: modules = ["craype", "rocm/6.2"]')
        modules = []
    if problems:
        raise ConfigError(problems)
    return MachineSettings(
        name=path.stem,
        path=path,
        environment=dict(tables.pop("environment")),
        modules=tuple(modules),
        tables={name: table for name, table in tables.items() if table},
    )


def take_environment(machine: MachineSettings, environment: MutableMapping[str, str]) -> list[str]:
    """Set the machine's variables in `environment` where they are not set; a line for each that is, otherwise.

    Its name too, which records hold: a centre's evidence asks for it.
    """
    others = machine.set_otherwise(environment)
    for name, value in {MACHINE_VARIABLE: machine.name, **machine.environment}.items():
        environment.setdefault(name, value)
    return [
        f"{name}={value} was set before and stays; the machine {machine.name} asks for {machine.environment[name]!r}"
        for name, value in others.items()
    ]


def _machine_of(site: Path) -> str:
    """What [site] of site.toml calls the machine; site_rules says what is wrong with the table."""
    table = read_toml(site).get("site", {})
    found = table.get("machine", "") if isinstance(table, dict) else ""
    if not isinstance(found, str):
        raise UsageError(f'{site}: machine in [site] must be a name: machine = "lumi-g"')
    return found
