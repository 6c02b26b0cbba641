"""The order of a command's flags in its help, their aliases, and the completions that a shell offers for them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from hpcdl.cli.output import say
from hpcdl.cluster.environment import placement
from hpcdl.config.forms import STEPS, TYPED, is_trace_spec
from hpcdl.core.errors import UsageError

FIRST = "Most used"
MOST_USED = (
    "model", "data", "strategy", "ranks", "batch-size", "epochs", "optimizer", "learning-rate", "run-dir", "resume",
)  # fmt: skip
"""The ten most important settings, in this order."""
OTHER = "Other options"
TITLES = {
    "data": "Data",
    "workload": "Workload",
    "model": "Model",
    "objective": "Optimisation",
    "optimizer": "Optimisation",
    "exchange": "Strategy",
    "elastic": "Strategy",
    "checkpoint": "Checkpoint",
    "safety": "Safety",
}
"""The heading of each group of settings; other groups use their own name."""
ELSEWHERE = {"steps": "Optimisation", "seed": "Optimisation", "tensorboard": "Checkpoint", "deterministic": "Safety"}
"""Settings that users look for under another heading than that of their group."""
ALIASES = {"ranks": ("-n",), "learning-rate": ("--lr",)}


def heading(group: str, key: str, known: Iterable[str]) -> str:
    """Return the heading of the setting `key` of `group`; `known` are all keys of the command.

    The ten come first only in a command that has them all: the help of other commands is short enough.
    """
    complete = set(MOST_USED) <= set(known)
    if key in MOST_USED and complete:
        return FIRST
    if group == "run":
        return ELSEWHERE.get(key, "Machine") if complete else "Run"
    return TITLES.get(group) or group.replace("_", " ").capitalize()


def with_bare_trace(arguments: Sequence[str], takes_value: Callable[[str], bool], *, interspersed: bool) -> list[str]:
    """Return `arguments` with a level added to each `--trace` without a value, so that the value is optional.

    `takes_value` tells whether an option is followed by a value. Without `interspersed`, all words after the first one
    that is not an option belong to another program.
    """
    completed: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--" or (not interspersed and not word.startswith("-")):
            return [*completed, word, *waiting]
        if word == "--trace":
            completed.append(f"--trace={waiting.pop(0) if waiting and is_trace_spec(waiting[0]) else STEPS}")
            continue
        completed.append(word)
        if waiting and takes_value(word):
            completed.append(waiting.pop(0))
    return completed


class OwnCommand(TyperCommand):
    """A command that says which value counts of an option that is given twice: the last, as with other programs."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after warning of each value that a later one overrides."""
        options = [parameter for parameter in self.get_params(ctx) if hasattr(parameter, "is_flag")]
        process = placement()
        if process is None or process.rank == 0:
            for unused, used in overridden(args, options, interspersed=ctx.allow_interspersed_args):
                say(f"warning: {unused} is ignored, because {used} follows")
        return super().parse_args(ctx, args)


def overridden(words: Sequence[str], options: Sequence[Any], *, interspersed: bool) -> list[tuple[str, str]]:
    """Return the values of `options` in `words` that a later value overrides, each with that later one.

    Without `interspersed`, all words after the first one that is not an option belong to another program.
    """
    by_name = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
    overrides: list[tuple[str, str]] = []
    last_values: dict[tuple[str, ...], tuple[Any, str]] = {}
    waiting = list(words)
    while waiting and waiting[0] != "--" and (interspersed or waiting[0].startswith("-")):
        name, equals, value = waiting.pop(0).partition("=")
        option = by_name.get(name)
        if option is None:
            continue
        values = [value] if equals else []
        if not option.is_flag:
            num_missing = option.nargs - len(values)
            values, waiting = [*values, *waiting[:num_missing]], waiting[num_missing:]
        # Values of a repeated option add up; those of --set override each other by key.
        if option.multiple and name != "--set":
            continue
        key = (option.name, values[0].partition("=")[0]) if option.multiple and values else (option.name,)
        setting, text = (name in option.secondary_opts, *values), shlex.join([name, *values])
        before = last_values.get(key, (setting, text))
        if before[0] != setting:
            overrides.append((before[1], text))
        last_values[key] = (setting, text)
    return overrides


class GroupedCommand(OwnCommand):
    """A command whose help lists its flags under their headings (rich_help_panel).

    Its `--trace` may have no value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments after giving a bare `--trace` its value."""
        flags = {name: item.is_flag for item in self.get_params(ctx) if hasattr(item, "is_flag") for name in item.opts}
        if "--trace" in flags:
            interspersed = ctx.allow_interspersed_args
            args = with_bare_trace(args, lambda word: not flags.get(word, True), interspersed=interspersed)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading: first the ten, then the table's headings, then flags without one."""
        sections: dict[str, list[tuple[str, str]]] = {
            FIRST: [],
            **{title: [] for title in TITLES.values()},
            "Machine": [],
        }
        arguments = []
        for parameter in sorted(self.get_params(ctx), key=_place):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or OTHER, []).append(record)
        other_records = sections.pop(OTHER, [])
        last = OTHER if any(sections.values()) else "Options"
        for title, records in [("Arguments", arguments), *sections.items(), (last, other_records)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class WordsBehindDashes(OwnCommand):
    """A command that takes another command after `--`; without a `--` it refuses options after that command's name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Raises UsageError if options follow the other command without a `--`."""
        options = [parameter for parameter in self.get_params(ctx) if hasattr(parameter, "is_flag")]
        alone = {
            name: parameter.is_flag for parameter in options for name in (*parameter.opts, *parameter.secondary_opts)
        }
        own_words, other_words, mixed = divided_by_owner(args, alone)
        if mixed and not {"--", *ctx.help_option_names} & {*args}:
            line = shlex.join([*ctx.command_path.split(), *own_words, "--", *other_words])
            raise UsageError(f"options of `{other_words[0]}` go after --, those of {ctx.info_name} before it: {line}")
        return super().parse_args(ctx, args)


def divided_by_owner(words: Sequence[str], alone: Mapping[str, bool]) -> tuple[list[str], list[str], bool]:
    """Return the options in `alone` with their values; the other words; whether an option follows the first of those.

    `alone` tells whether an option takes no value.
    """
    own_words: list[str] = []
    other_words: list[str] = []
    mixed = False
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") and len(word) > 1
        mixed = mixed or (is_option and bool(other_words))
        (own_words if name in alone or (is_option and not other_words) else other_words).append(word)
        if name in alone and not equals and not alone[name] and waiting:
            own_words.append(waiting.pop(0))
    return own_words, other_words, mixed


def _place(item: Any) -> int:
    """Sort key: the ten in their order, all others after them as declared."""
    key = item.name.replace("_", "-")
    first = getattr(item, "rich_help_panel", None) == FIRST
    return MOST_USED.index(key) if first else len(MOST_USED)


def _strategies() -> list[str]:
    from hpcdl.strategies.table import listed_strategies

    return [info.name for info in listed_strategies()]


def _models() -> list[str]:
    from hpcdl.models.table import MODELS

    return list(MODELS)


def _machines() -> list[str]:
    from hpcdl.node.machines import machine_names

    return machine_names()


def _profiles() -> list[str]:
    from hpcdl.node.profile import site_folder, user_folder

    paths = [str(path) for folder in (user_folder(), site_folder()) for path in sorted(folder.glob("*.toml"))]
    return ["auto", "none", *paths]


_OFFERED: dict[str, Callable[[], list[str]]] = {
    "compress": lambda: list(TYPED),
    "strategy": _strategies,
    "model": _models,
    "machine": _machines,
    "profile": _profiles,
}


def completer(key: str, choices: tuple[str, ...] = ()) -> Callable[[str], list[str]] | None:
    """Return the completions for the flag `--key`: its `choices`, or known names; None leaves it to the shell."""
    names = (lambda: list(choices)) if choices else _OFFERED.get(key)
    if names is None:
        return None

    def offered(incomplete: str) -> list[str]:
        # `a,b,` completes the name after the last comma, for flags that take several.
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last)]

    return offered
