"""The table of commands, in the order of use in a study, and the app with the requested ones."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from typer._completion_classes import completion_init
from typer.completion import show_callback
from typer.core import TyperCommand, TyperGroup

from hpcdl import __version__
from hpcdl.cli.groups import OwnCommand
from hpcdl.cli.output import VERBOSE, command_in, put

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "data": ("shard", "inspect"),
    "node": ("tune-threads", "node"),
    "training.train": ("train",),
    "study.sweep": ("sweep",),
    "study.search": ("search",),
    "study.predict": ("predict",),
    "training.run": ("run",),
    "training.runs": ("runs", "diff", "checkpoints"),
    "training.watch": ("watch",),
    "training.evaluate": ("evaluate", "export"),
    "training.infer": ("infer",),
    "site.submit": ("submit",),
    "site.jobs": ("jobs", "cancel"),
    "study.report": ("report",),
    "training.trace": ("trace",),
    "study.bench": ("bench",),
    "site.lists": ("models", "strategies", "examples"),
    "site.config": ("config",),
    "site.doctor": ("doctor",),
    "site.certify": ("certify",),
    "site.docs": ("docs", "explain"),
    "site.env": ("env",),
}
"""The commands of each file."""

CONTENTS: Mapping[str, tuple[str, ...]] = {
    "Data": ("shard", "inspect"),
    "Training": ("train", "run", "watch", "runs", "diff", "checkpoints"),
    "Trained models": ("evaluate", "export", "infer"),
    "Scaling studies": ("sweep", "search", "predict", "report", "trace"),
    "Batch jobs": ("submit", "jobs", "cancel"),
    "This node and installation": ("tune-threads", "node", "doctor", "certify", "bench", "config", "env"),
    "Lists and help": ("models", "strategies", "examples", "docs", "explain"),
}
"""The headings of `hpcdl --help`, with their commands."""


class Contents(TyperGroup):
    """All commands, listed as a table of contents."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the loaded commands, in the order of the headings."""
        return [name for names in CONTENTS.values() for name in names if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section of commands for each heading, each command with one line."""
        widest = max(map(len, self.commands))
        for heading, names in CONTENTS.items():
            commands = [self.commands[name] for name in names if name in self.commands]
            rows = [
                (f"{command.name:{widest}}", command.get_short_help_str(formatter.width - widest - 6))
                for command in commands
            ]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def _version(wanted: bool) -> None:
    if wanted:
        put(f"hpcdl {__version__}")
        raise typer.Exit


def _install_completion(wanted: bool) -> None:
    if wanted:
        from hpcdl.cli.completion import install

        install()
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and TensorFlow's own log.")] = False,
    install_completion: Annotated[
        bool,
        typer.Option(
            "--install-completion",
            callback=_install_completion,
            is_eager=True,
            help="Write completion for this shell into a file, and say how it is loaded.",
        ),
    ] = False,
    show_completion: Annotated[
        bool,
        typer.Option(
            "--show-completion", callback=show_callback, is_eager=True, help="Print completion for this shell."
        ),
    ] = False,
) -> None:
    """Distributed deep learning for HPC centres: shard data, tune a node, train over MPI, report how it scales."""
    if verbose:
        os.environ[VERBOSE] = "1"


def app_for(words: Sequence[str] = ()) -> typer.Typer:
    """Return the app for a command line, with only the command that it names, else with all of them.

    Building all commands takes as long as all other work of a training before its ranks start.
    """
    # Typer calls it only with its own options for completion, which `root` replaces.
    completion_init()
    app = typer.Typer(
        name="hpcdl",
        cls=Contents,
        add_completion=False,
        help=root.__doc__,
        epilog="Example: hpcdl train --model lenet --data shards --strategy ring --ranks 2 --epochs 5",
        no_args_is_help=True,
        # Both settings keep rich from being imported, for which `hpcdl --help` has no time.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(root)
    named = None if {*words[:1]} & {"-h", "--help"} else command_in(words)
    # For an unknown command all are loaded: typer then suggests the nearest.
    for module in [module_name for module_name, names in COMMANDS.items() if named in names] or COMMANDS:
        importlib.import_module(f"hpcdl.cli.{module}").register(app)
    _own_commands(app)
    return app


def _own_commands(app: typer.Typer) -> None:
    """Make each command without a class of its own warn of an option that has two values."""
    for command in app.registered_commands:
        command.cls = OwnCommand if command.cls is TyperCommand else command.cls
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _own_commands(group.typer_instance)
