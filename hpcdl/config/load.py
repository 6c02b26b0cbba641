"""Layers of settings become one frozen config: defaults < site < machine < user < file < flags; all errors at once.

`$HPCDL_MACHINE` names the machine, else `machine` in the table [site] of site.toml. The machine's tables named like
commands override those of site.toml. Its environment applies to `train`, `run` and their ranks; job scripts load its
modules. This module also reads a site's rules for all its users: the table [site] of site.toml.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from hpcdl.config.settings import Setting, settings_of
from hpcdl.core.errors import ConfigError, UsageError, suggestion
from hpcdl.core.paths import site_config_file, user_config_folder
from hpcdl.core.storage.files import read_toml
from hpcdl.core.units import listed

MACHINE_VARIABLE = "HPCDL_MACHINE"
COMMANDS = ("train", "run", "submit", "sweep", "search")
"""Commands for which a machine may set defaults."""
TABLES = (
    *COMMANDS,
    *("shard", "infer", "tune-threads"),
    *("bench-allreduce", "bench-input", "bench-pingpong", "bench-precision", "bench-step"),
)
"""Tables that site.toml and a user's config.toml may have; site.toml also has [site]."""
_KEYS = ("summary", "sources", "modules", "environment", *COMMANDS)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+/-]*")
_REFUSED = re.compile(r"(LD_.*|PATH|PYTHON.*|HOME|BASH_.*|ENV|IFS|HPCDL_(RANK|SIZE|SITE_CONFIG|SHARE|MACHINE))")
"""Variables that would change which program runs, not how: modules set them."""


@dataclass(frozen=True, kw_only=True)
class MachineSettings:
    """The content of a machine's file; `tables` are defaults by command, `origin` names the file in messages."""

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
        """Return the machine's variables that have another value in `environment`, with that value."""
        return {
            name: environment[name]
            for name, value in self.environment.items()
            if name in environment and environment[name] != value
        }


def machine_in_force(environment: Mapping[str, str] = os.environ) -> MachineSettings | None:
    """Return the settings of this machine; None if it has no name or no file.

    Raises UsageError if site.toml names a machine without a file, ConfigError with all problems of a file.
    """
    site = site_config_file()
    named = environment.get(MACHINE_VARIABLE, "")
    by_site = "" if named or not site.is_file() else _machine_of(site)
    name = named or by_site
    if not _NAME.fullmatch(name):  # a name for records only, such as "two cores of mine"
        return None
    # `_NAME` admits no slash, so that the file is in this folder.
    path = site.parent / "machines" / f"{name}.toml"
    if path.is_file():
        return read_machine_settings(path)
    # A name in the variable may be for records alone, but site.toml names a machine for the sake of its file.
    if by_site:
        raise UsageError(f"{site}: machine = {name!r}, but there is no {path}; write it, or leave machine out")
    return None


def read_machine_settings(path: Path) -> MachineSettings:
    """Return the settings in a file. Raises ConfigError with all its problems."""
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
    if not isinstance(modules, list) or not all(
        isinstance(module, str) and _MODULE.fullmatch(module) for module in modules
    ):
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
    """Set the machine's variables in `environment` unless they are set; return a line for each that differs.

    Also set the machine's name, which records hold for the evidence of a centre.
    """
    differing = machine.set_otherwise(environment)
    for name, value in {MACHINE_VARIABLE: machine.name, **machine.environment}.items():
        environment.setdefault(name, value)
    return [
        f"{name}={value} was set before and stays; the machine {machine.name} asks for {machine.environment[name]!r}"
        for name, value in differing.items()
    ]


def _machine_of(site: Path) -> str:
    """Return the machine that [site] of site.toml names; site_rules reports problems of the table."""
    table = read_toml(site).get("site", {})
    name = table.get("machine", "") if isinstance(table, dict) else ""
    if not isinstance(name, str):
        raise UsageError(f'{site}: machine in [site] must be a name: machine = "lumi-g"')
    return name


Config = TypeVar("Config")
_KEY = "forbid-strategies"
_SITE_KEYS = (_KEY, "machine")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Raw values by key, and their origin for messages: `site.toml`, `--config x.toml`, `flag`.

    `tables`: the tables that its file may have beside these keys; the caller has taken them out.
    """

    origin: str
    values: Mapping[str, Any]
    tables: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Generic[Config]):
    """A config, and the origin of each of its keys."""

    config: Config
    origins: Mapping[str, str]


def groups_of(cls: type) -> dict[str, type]:
    """Return the groups (attribute name to dataclass) of a config class."""
    return dict(get_type_hints(cls))


def all_settings(cls: type) -> list[Setting]:
    """Return every setting of a config class, group by group."""
    return [setting for group in groups_of(cls).values() for setting in settings_of(group)]


def settings_by_key(cls: type) -> dict[str, Setting]:
    """As `all_settings`, by flag name."""
    return {setting.key: setting for setting in all_settings(cls)}


def standard_layers(command: str) -> list[Layer]:
    """Return the layers of site, machine and user: the table `[command]` of each file that exists."""
    layers = []
    machine = machine_in_force()
    for origin, path in (("site", site_config_file()), ("user", user_config_folder() / "config.toml")):
        # Here, because the order of layers is their precedence: site < machine < user.
        if origin == "user" and machine is not None and command in machine.tables:
            layers.append(Layer(origin=machine.origin, values=plain_keys(machine.tables[command])))
        if path.is_file():
            document = read_toml(path)
            _check_tables(path, document, (*TABLES, "site") if origin == "site" else TABLES)
            table = document.get(command, {})
            if not isinstance(table, dict):
                raise UsageError(f"{path}: {command} must be a table; write [{command}], and its keys below")
            layers.append(Layer(origin=f"{origin} ({path})", values=plain_keys(table)))
    return layers


def _check_tables(path: Path, document: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for what no command would read: keys above all tables, and unknown tables."""
    problems = []
    for key, value in document.items():
        if key in known:
            continue
        if not isinstance(value, dict):
            problems.append(f"{path}: {key} is in no table; write it below the table of a command, such as [train]")
        elif key == "site":
            problems.append(f"{path}: the table [site] holds for all users; only {site_config_file()} may have it")
        else:
            problems.append(f"{path}: unknown table [{key}]{suggestion(key, known)}")
    if problems:
        raise ConfigError(problems)


def file_layer(path: Path) -> Layer:
    """Return the layer of a `--config` file, whose keys are the flags' names."""
    return Layer(origin=f"file ({path})", values=plain_keys(read_toml(path)))


def flag_layer(values: Mapping[str, Any]) -> Layer:
    """Return the layer of the command line without absent flags (None)."""
    return Layer(origin="flag", values={key: value for key, value in plain_keys(values).items() if value is not None})


def set_layer(pairs: list[str]) -> Layer:
    """Return the layer of `--set key=value` flags."""
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"--set {pair}: write --set key=value")
        values[key.strip()] = value
    return Layer(origin="--set", values=plain_keys(values))


def load(cls: type[Config], layers: list[Layer]) -> ResolvedConfig[Config]:
    """Merge `layers` (weakest first) over the defaults into a `cls`. Raises ConfigError with every problem."""
    settings = {setting.key: setting for setting in all_settings(cls)}
    problems: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        for key, raw in layer.values.items():
            if key not in settings:
                from hpcdl.config.other_names import unknown_key  # not read where every key is known

                unknown = unknown_key(key, settings)
                problems.append(
                    f"{layer.origin}: {_unknown_table(key, raw, settings, layer) if isinstance(raw, dict) else unknown}"
                )
                continue
            try:
                values[key] = settings[key].parse(raw)
                origins[key] = layer.origin
            except ValueError as error:
                problems.append(_complaint(layer.origin, key, error))
    for key, setting in settings.items():
        if key in values:
            continue
        if setting.required:
            # Otherwise it was given with an invalid value, which is a problem already.
            if not any(key in layer.values for layer in layers):
                problems.append(f"--{key} is needed: {setting.help}")
        else:
            values[key], origins[key] = setting.default, "default"
    if problems:
        raise ConfigError(problems)
    return ResolvedConfig(config=_build(cls, values), origins=origins)


def _unknown_table(name: str, table: Mapping[str, Any], settings: Collection[str], layer: Layer) -> str:
    if layer.tables:
        if table and not get_close_matches(name, layer.tables, n=1, cutoff=0.7) and {*table} & {*settings}:
            own = listed([key for key in table if key in settings])
            return f"[{name}] is no table of this file; write {own} above all tables, without [{name}]"
        return f"unknown table [{name}]{suggestion(name, layer.tables)}"
    return f"[{name}] is a table, but this file has none; write keys alone, such as epochs = 5"


def flatten(config: Any) -> dict[str, Any]:
    """Return the values of a config by key."""
    return {
        setting.key: getattr(getattr(config, group), setting.name)
        for group, cls in groups_of(type(config)).items()
        for setting in settings_of(cls)
    }


def as_toml_values(config: Any) -> dict[str, Any]:
    """As `flatten`, with types that TOML has; unset values and empty lists are omitted."""
    converted = {}
    for key, value in flatten(config).items():
        if value is None or value == ():  # TOML has no null
            continue
        converted[key] = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return converted


def replace(config: Config, **changes: Any) -> Config:
    """Return `config` with changed settings, given by attribute name, in whatever group they are."""
    groups = {}
    for group, cls in groups_of(type(config)).items():
        changed = {setting.name: changes.pop(setting.name) for setting in settings_of(cls) if setting.name in changes}
        groups[group] = dataclasses.replace(getattr(config, group), **changed)
    if changes:
        raise TypeError(f"no such settings: {', '.join(changes)}")
    return type(config)(**groups)


def _build(cls: type[Config], values: Mapping[str, Any]) -> Config:
    return cls(
        **{
            group: group_cls(**{setting.name: values[setting.key] for setting in settings_of(group_cls)})
            for group, group_cls in groups_of(cls).items()
        }
    )


def plain_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` by flag name: with dashes in place of underscores, which a file may use."""
    dashed = {key.replace("_", "-"): value for key, value in values.items()}
    if len(dashed) < len(values):
        twice = next(key for key in values if "_" in key and key.replace("_", "-") in values)
        raise UsageError(f"{twice} and {twice.replace('_', '-')} are one setting, given twice; leave one of them out")
    return dashed


def _complaint(origin: str, key: str, error: ValueError) -> str:
    return f"--{key}: {error}" if origin == "flag" else f"{origin}: {key}: {error}"


@dataclass(frozen=True, kw_only=True)
class SiteRules:
    """The site's rules, and the file that holds them."""

    forbid_strategies: tuple[str, ...] = ()
    origin: str = ""


def site_rules() -> SiteRules:
    """Return the rules in force; none without a site.toml. Raises UsageError if the table is invalid."""
    path = site_config_file()
    if not path.is_file():
        return SiteRules()
    table = read_toml(path).get("site", {})
    if not isinstance(table, dict):
        raise UsageError(f"{path}: [site] must be a table; write [site] and {_KEY} below it")
    for key in table:
        if key not in _SITE_KEYS:
            raise UsageError(f"{path}: unknown key {key!r} in [site]{suggestion(key, _SITE_KEYS)}")
    names = table.get(_KEY, [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f'{path}: {_KEY} must be a list of names; write {_KEY} = ["grpc-ps", "grpc-ring"]')
    return SiteRules(forbid_strategies=tuple(names), origin=str(path))
