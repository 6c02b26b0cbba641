"""`hpcdl models | strategies | examples`: list the parts of hpcdl; examples can also be copied."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, put, say
from hpcdl.core.units import format_bytes, format_count
from hpcdl.models.table import MODELS

_FIELDS = ("name", "parameters", "moving_statistics", "macs", "gradient_bytes", "input_shape", "classes")


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command("models", epilog="Example: hpcdl models --json")(models)
    app.command(epilog="Example: hpcdl strategies --json")(strategies)
    app.command(epilog="Example: hpcdl examples digits my_model.py")(examples)


def models(json: JsonFlag = False) -> None:
    """List the networks with their sizes.

    Parameters, multiply-accumulates per image (MACs) and bytes of gradients.
    """
    if json:
        print_json({"models": [{field: getattr(info, field) for field in _FIELDS} for info in MODELS.values()]})
        return
    print_table(
        ["model", "parameters", "MACs", "gradients", "input", "classes", "summary"],
        [
            [
                info.name,
                format_count(info.parameters),
                format_count(info.macs),
                format_bytes(info.gradient_bytes),
                "x".join(map(str, info.input_shape)),
                format_count(info.classes),
                info.summary,
            ]
            for info in MODELS.values()
        ],
    )
    say(
        "next: hpcdl train --model lenet --data synthetic:mnist --steps 20, or a function of your own: "
        "--model path/to/file.py:build"
    )


def strategies(json: JsonFlag = False) -> None:
    """List the parallel strategies.

    With --json also their sources and what goes with them.
    """
    from hpcdl.strategies.table import listed_strategies

    strategies = listed_strategies()
    if json:
        print_json({"strategies": [info.as_json() for info in strategies]})
        return
    print_table(("strategy", "family", "what it does"), [(info.name, info.family, info.summary) for info in strategies])
    say("next: hpcdl train --strategy ring --model lenet --data synthetic:mnist --steps 20 --ranks 2")


def examples(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="What to copy; without any, all are listed.")
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Copy into this folder.")] = Path(),
    json: JsonFlag = False,
) -> None:
    """List the examples of hpcdl, or copy some into a folder.

    An existing file with other content is never replaced.
    """
    from hpcdl.core.pages.manual import copy_examples, list_examples

    if not names:
        listed = list_examples()
        if json:
            print_json({"examples": [{"name": example.name, "summary": example.summary} for example in listed]})
            return
        print_table(["example", "what it is"], [[example.name, example.summary] for example in listed])
        say("next: `hpcdl examples digits my_model.py` copies these two here")
        return
    copied = copy_examples([*dict.fromkeys(names)], to)
    if json:
        print_json({"copied": [str(path) for path in copied]})
        return
    for path in copied:
        put(f"copied: {path}")
