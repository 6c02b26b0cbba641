"""`hpcdl models`: the networks and how large they are."""

from __future__ import annotations

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, say
from hpcdl.core.units import format_bytes, format_count
from hpcdl.models.table import MODELS

_FIELDS = ("name", "parameters", "moving_statistics", "macs", "gradient_bytes", "input_shape", "classes")


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("models", epilog="Example: hpcdl models --json")(models)


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
    say("next: hpcdl train --model NAME --data DIR, or a function of your own: --model path/to/file.py:build")
