"""How a command's flags are ordered in its help, what else they are called, and what a shell's tab offers for them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

from hpcdl.config.forms import STEPS, TYPED, is_trace_spec
from hpcdl.core.errors import UsageError

FIRST = "Most used"
MOST_USED = (
    "model", "data", "strategy", "ranks", "batch-size", "epochs", "optimizer", "learning-rate", "run-dir", "resume",
)  # fmt: skip
"""The ten that matter first, in this order."""
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
"""The heading of each group of settings; a group that is not named here stands under its own name."""
ELSEWHERE = {"steps": "Optimisation", "seed": "Optimisation", "tensorboard": "Checkpoint", "deterministic": "Safety"}
"""Settings that people look for under another heading than that of their group."""
ALIASES = {"ranks": ("-n",), "learning-rate": ("--lr",)}


def heading(group: str, key: str, known: Iterable[str]) -> str:
    """Where the setting `key` of `group` stands; `known` are all keys of the command.

    The ten come first only where a command has them all: others are short enough.
    """
    complete = set(MOST_USED) <= set(known)
    if key in MOST_USED and complete:
        return FIRST
    if group == "run":
        return ELSEWHERE.get(key, "Machine") if complete else "Run"
    return TITLES.get(group) or group.replace("_", " ").capitalize()


def with_bare_trace(arguments: Sequence[str], takes_value: Callable[[str], bool], *, interspersed: bool) -> list[str]:
    """`arguments` with a level behind each `--trace` that stands alone, so that it needs none on the command line.

    `takes_value` says of an option whether the next word belongs to it. Without `interspersed` what follows the first
    word that is not an option is somebody else's.
    """
    found: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--" or (not interspersed and not word.startswith("-")):
            return [*found, word, *waiting]
        if word == "--trace":
            found.append(f"--trace={waiting.pop(0) if waiting and is_trace_spec(waiting[0]) else STEPS}")
            continue
        found.append(word)
        if waiting and takes_value(word):
            found.append(waiting.pop(0))
    return found


class GroupedCommand(TyperCommand):
    """A command whose help lists its flags under the headings that they carry as their panel.

    Its `--trace` may stand without a value.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, once a bare `--trace` has its value."""
        flags = {name: item.is_flag for item in self.get_params(ctx) if hasattr(item, "is_flag") for name in item.opts}
        if "--trace" in flags:
            interspersed = ctx.allow_interspersed_args
            args = with_bare_trace(args, lambda word: not flags.get(word, True), interspersed=interspersed)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading: the ten first, then by table, then those without one."""
        sections: dict[str, list[tuple[str, str]]] = {
            FIRST: [],
            **{title: [] for title in TITLES.values()},
            "Machine": [],
        }
        arguments = []
        for item in sorted(self.get_params(ctx), key=_place):
            record = item.get_help_record(ctx)
            if record is None:
                continue
            if item.param_type_name == "argument":
                arguments.append(record)
            else:
                sections.setdefault(getattr(item, "rich_help_panel", None) or OTHER, []).append(record)
        others = sections.pop(OTHER, [])
        last = OTHER if any(sections.values()) else "Options"
        for title, records in [("Arguments", arguments), *sections.items(), (last, others)]:
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class WordsBehindDashes(TyperCommand):
    """A command that takes another one behind `--`, and refuses options behind that one's name without a `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse. UsageError where an option follows the other command, and nothing says whose it is."""
        options = [item for item in self.get_params(ctx) if hasattr(item, "is_flag")]
        alone = {name: item.is_flag for item in options for name in (*item.opts, *item.secondary_opts)}
        own, others, mixed = divided_by_owner(args, alone)
        if mixed and not {"--", *ctx.help_option_names} & {*args}:
            line = shlex.join([*ctx.command_path.split(), *own, "--", *others])
            raise UsageError(f"options of `{others[0]}` stand behind --, those of {ctx.info_name} before it: {line}")
        return super().parse_args(ctx, args)


def divided_by_owner(words: Sequence[str], alone: Mapping[str, bool]) -> tuple[list[str], list[str], bool]:
    """The options in `alone`, with their values; the other words; whether an option stands behind the first of those.

    `alone` says of an option whether no value follows it.
    """
    own: list[str] = []
    others: list[str] = []
    mixed = False
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") and len(word) > 1
        mixed = mixed or (is_option and bool(others))
        (own if name in alone or (is_option and not others) else others).append(word)
        if name in alone and not equals and not alone[name] and waiting:
            own.append(waiting.pop(0))
    return own, others, mixed


def _place(item: Any) -> int:
    """The ten in their order, all others after them as they are declared."""
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

    found = [str(path) for folder in (user_folder(), site_folder()) for path in sorted(folder.glob("*.toml"))]
    return ["auto", "none", *found]


_OFFERED: dict[str, Callable[[], list[str]]] = {
    "compress": lambda: list(TYPED),
    "strategy": _strategies,
    "model": _models,
    "machine": _machines,
    "profile": _profiles,
}


def completer(key: str, choices: tuple[str, ...] = ()) -> Callable[[str], list[str]] | None:
    """What a tab offers for the flag `--key`: its `choices`, or the names there are; None leaves it to the shell."""
    names = (lambda: list(choices)) if choices else _OFFERED.get(key)
    if names is None:
        return None

    def offered(incomplete: str) -> list[str]:
        # `a,b,` completes the name behind the last comma, for flags that take several.
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in names() if name.startswith(last)]

    return offered
