"""`hpcdl config show`: the settings of a run and the origin of each."""

from __future__ import annotations

from typing import Any

import typer

from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import ConfigFlag, JsonFlag, SetFlag, machine_rows, settings_for_show, takes_settings
from hpcdl.cli.output import print_json, print_table
from hpcdl.config.load import machine_in_force
from hpcdl.config.schema import TrainConfig

commands = typer.Typer(no_args_is_help=True, help="Show settings and where each comes from.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(commands, name="config")


@commands.command(cls=GroupedCommand, epilog="Example: hpcdl config show --config study.toml --set batch-size=64")
@takes_settings(TrainConfig)
def show(flags: dict[str, Any], config: ConfigFlag = None, set_: SetFlag = None, json: JsonFlag = False) -> None:
    """Print every setting of `hpcdl train`. With its value, and the layer that it comes from."""
    rows = settings_for_show(TrainConfig, "train", flags, config, set_)
    machine = machine_in_force()
    rows_of_machine = machine_rows(machine)
    if json:
        name = None if machine is None else machine.name
        print_json({"settings": _objects(rows), "machine": {"name": name, "settings": _objects(rows_of_machine)}})
        return
    print_table(("setting", "value", "from"), [*rows, *rows_of_machine])


def _objects(rows: list[tuple[str, str, str]]) -> list[dict[str, str]]:
    return [{"key": key, "value": value, "origin": origin} for key, value, origin in rows]
