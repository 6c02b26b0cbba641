"""Flags generated from the settings that config/ declares, so that each is declared only once."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.groups import ALIASES, completer, heading
from hpcdl.cli.output import Commentary, say
from hpcdl.config.forms import TYPED
from hpcdl.config.load import (
    Layer,
    MachineSettings,
    ResolvedConfig,
    all_settings,
    file_layer,
    flag_layer,
    flatten,
    groups_of,
    load,
    machine_in_force,
    set_layer,
    standard_layers,
    take_environment,
)
from hpcdl.config.settings import Setting, settings_of

if TYPE_CHECKING:
    from hpcdl.cluster.environment import Placement
    from hpcdl.config.schema import StartConfig

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
QuietFlag = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the result, warnings and errors; no progress, no advice.")
]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file whose keys are the flags.")
]
ImportFlag = Annotated[
    tuple[str, Path] | None,
    typer.Option("--import", metavar="csv FILE", help="Runs measured elsewhere: `csv` and a file."),
]
NetworkFlag = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="FILE|NAME|LATENCY,SIZE",
        help="What is known of the network: a name, a file, one of `bench allreduce --json`, or 2us,12.5GB.",
    ),
]
MachineFlag = Annotated[
    str | None, typer.Option("--machine", metavar="NAME", help="Node type to predict for, where it is another one.")
]
TrustFlag = Annotated[bool, typer.Option("--trust", help="Run the code that another user's run names.")]
SetFlag = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting; may be repeated.")]

_METAVARS = {
    "int": "N",
    "float": "X",
    "bytes": "SIZE",
    "seconds": "TIME",
    "limit": "TIME",
    "interval": "TIME|auto",
    "accuracy": "PCT",
    "count": "N|auto",
    "size": "N|HxW",
    "Path": "PATH",
    "str": "TEXT",
    "counts": "N,N",
    "shares": "N,N",
    "names": "NAME,NAME",
    "words": "OPTION",
    "trace": "[SPEC]",
    "compression": "|".join(TYPED),
}
_WIDEST_CHOICES = 60
"""The width of a flag's line for `a|b|c`, in characters."""


def takes_settings(cls: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command every setting of `cls` as an optional flag; its `flags` argument receives them by key.

    Values arrive as text and are parsed with all other layers, so that every mistake is reported at once.
    """
    settings = all_settings(cls)
    keys = [setting.key for setting in settings]
    titles = {
        setting.key: heading(group, setting.key, keys)
        for group, parameters in groups_of(cls).items()
        for setting in settings_of(parameters)
    }

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            # Annotations are strings here (`from __future__ import annotations`), which typer cannot use.
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "flags"
        ]
        generated = [_parameter(setting, titles[setting.key]) for setting in settings]

        def wrapper(**values: Any) -> Any:
            flags = {setting.key: _as_one(setting, values.pop(setting.name)) for setting in settings}
            return command(flags=flags, **values)

        wrapper.__doc__ = command.__doc__
        wrapper.__name__ = command.__name__
        # Typer builds the options from signature and annotations.
        wrapper.__signature__ = inspect.Signature([*generated, *parameters])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*generated, *parameters]}
        return wrapper

    return decorate


def resolved(
    cls: type[Any],
    command: str,
    flags: Mapping[str, Any],
    config: Path | None,
    pairs: list[str] | None,
    below: Sequence[Layer] = (),
) -> ResolvedConfig[Any]:
    """Return the config of a command from all its layers, weakest first; `below` are weaker than file and flags."""
    return load(cls, _layers(command, flags, config, pairs, below))


def _layers(
    command: str,
    flags: Mapping[str, Any],
    config: Path | None,
    pairs: list[str] | None,
    below: Sequence[Layer] = (),
) -> list[Layer]:
    layers = [*standard_layers(command), *below]
    if config is not None:
        layers.append(file_layer(config))
    return [*layers, set_layer(pairs or []), flag_layer(flags)]


def _as_one(setting: Setting, value: Any) -> Any:
    """Return the value of a flag; join a repeated flag with commas, unless commas are part of its words."""
    if isinstance(value, list):
        return (value or None) if setting.kind == "words" else ",".join(value)
    return value


def names_in(words: Sequence[str] | None) -> list[str]:
    """Return the names given by a repeated flag; each of its `words` holds one or several, separated by commas."""
    return [name.strip() for word in words or () for name in word.split(",") if name.strip()]


def _parameter(setting: Setting, title: str) -> inspect.Parameter:
    # The default is in the help's text, as a user would type it (`_help`).
    option_keywords: dict[str, Any] = {"help": _help(setting), "show_default": False, "rich_help_panel": title}
    if setting.kind == "bool":
        annotation: Any = Annotated[bool | None, typer.Option(f"--{setting.key}/--no-{setting.key}", **option_keywords)]
    else:
        metavar = "NAME" if _many(setting) else "|".join(setting.choices) or _METAVARS.get(setting.kind, "TEXT")
        names = (f"--{setting.key}", *ALIASES.get(setting.key, ()))
        offered = completer(setting.key, setting.choices)
        option = typer.Option(*names, metavar=metavar, autocompletion=offered, **option_keywords)
        kind = list[str] if setting.kind in ("names", "words") else str
        annotation = Annotated[kind | None, option]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def as_flag(setting: Setting, value: Any) -> list[str]:
    """Return a setting as words of a command line."""
    if setting.kind == "bool":
        return [f"--{setting.key}" if value else f"--no-{setting.key}"]
    return [f"--{setting.key}", setting.show(value)]


def _help(setting: Setting) -> str:
    text = f"{setting.help.removesuffix('.')}: {', '.join(setting.choices)}." if _many(setting) else setting.help
    if setting.required or setting.default in (None, (), "") or setting.default is False:
        return text
    return f"{text} [{setting.show(setting.default)}]"


def _many(setting: Setting) -> bool:
    """Return whether the choices do not fit into the flag's line."""
    return len("|".join(setting.choices)) > _WIDEST_CHOICES


def settings_of_files(cls: type[Any], settings: ResolvedConfig[Any]) -> list[tuple[str, str, str]]:
    """Return key, value as typed, and file of each setting that comes from a file."""
    values = flatten(settings.config)
    return [
        (setting.key, setting.show(values[setting.key]), settings.origins[setting.key])
        for setting in all_settings(cls)
        if settings.origins[setting.key] not in ("default", "flag")
    ]


def print_settings_of_files(cls: type[Any], settings: ResolvedConfig[Any], keys: Sequence[str] = ()) -> None:
    """Print the settings that come from files (only `keys`, if given): a user who did not write them must see them."""
    for key, value, origin in settings_of_files(cls, settings):
        if not keys or key in keys:
            say(f"--{key} {value}: {origin}")


def take_machine(commentary: Commentary) -> None:
    """Set the variables of the machine's file for this process and its ranks; report those that were set before."""
    machine = machine_in_force()
    for line in () if machine is None else take_environment(machine, os.environ):
        commentary.say(line)


def begin(settings: ResolvedConfig[Any], *, quiet: bool) -> Placement | None:
    """Load the modules of --module by restarting this program with them, and set the machine's variables.

    Returns this process's place under another launcher, None without one. Warns about a job of several nodes that would
    use one rank because no number was given.
    """
    from hpcdl.cluster.environment import placement
    from hpcdl.cluster.launchers import find_launcher
    from hpcdl.cluster.own_env import go_on_with

    run: StartConfig = settings.config.run
    if run.module is not None:
        # First, because it replaces this process: nothing may have started.
        go_on_with(run.module, sys.argv[1:])
    process = placement()
    if process is not None and process.rank == 0 and run.stage_env:
        say(
            f"warning: --stage-env does nothing here, because {process.launcher} has started Python already; leave it "
            "out, or have hpcdl start the ranks (--ranks N)"
        )
    commentary = Commentary(quiet=quiet or (process is not None and process.rank != 0))
    take_machine(commentary)
    if process is None and settings.origins["ranks"] == "default":
        nodes = len(find_launcher().hosts(os.environ))
        if nodes > 1:
            commentary.say(f"warning: one rank on one of this job's {nodes} nodes; --ranks {nodes} starts one on each")
    return process


def machine_rows(machine: MachineSettings | None) -> list[tuple[str, str, str]]:
    """Return each variable of the machine's file with its value here, and the modules of job scripts, with origins."""
    if machine is None:
        return []
    set_values = machine.set_otherwise(os.environ)
    rows = [
        (
            f"environment {name}",
            set_values.get(name, value),
            "your environment" if name in set_values else machine.origin,
        )
        for name, value in machine.environment.items()
    ]
    if machine.modules:
        rows.append(("modules of job scripts", ", ".join(machine.modules), machine.origin))
    return rows


def settings_for_show(
    cls: type[Any], command: str, flags: Mapping[str, Any], config: Path | None, pairs: list[str] | None
) -> list[tuple[str, str, str]]:
    """Return key, value as typed, and origin of every setting; a missing required one shows as `(needed)`."""
    settings = all_settings(cls)
    placeholders = Layer(origin="(needed)", values={setting.key: "?" for setting in settings if setting.required})
    layers = [placeholders, *_layers(command, flags, config, pairs)]
    loaded = load(cls, layers)
    values = flatten(loaded.config)
    return [(setting.key, setting.show(values[setting.key]), loaded.origins[setting.key]) for setting in settings]
