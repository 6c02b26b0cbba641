"""`hpcdl bench`: measurements on this machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from hpcdl.cli import bench_allreduce, bench_input
from hpcdl.cli.options import ConfigFlag, JsonFlag, SetFlag, effective, takes_settings
from hpcdl.cli.output import print_json, say
from hpcdl.config.bench import StepBenchConfig
from hpcdl.core.units import format_bytes, format_rate, format_seconds

commands = typer.Typer(no_args_is_help=True, help="Measure all-reduces, a step, or the input.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    bench_allreduce.register(commands)
    commands.command(name="input", epilog=bench_input.EPILOG)(bench_input.input_command)
    app.add_typer(commands, name="bench")


@commands.command(epilog="Example: hpcdl bench step --model resnet50 --batch-size 8 --ranks 2 --strategy ring")
@takes_settings(StepBenchConfig)
def step(flags: dict[str, Any], config: ConfigFlag = None, set_: SetFlag = None, json: JsonFlag = False) -> None:
    """Time a model's step with and without the exchange of gradients."""
    from hpcdl.bench.step import run

    result = run(effective(StepBenchConfig, "bench-step", flags, config, set_).config)
    if json:
        print_json(dataclasses.asdict(result))
        return
    print(f"step                   {format_seconds(result.step_seconds)}")
    if result.compute_seconds is not None:
        print(f"  compute              {format_seconds(result.compute_seconds)}")
    if result.exposed_communication_seconds is not None:
        print(f"  exposed exchange     {format_seconds(result.exposed_communication_seconds)}")
    if result.efficiency is not None:
        print(f"efficiency             {result.efficiency:.3f}")
    print(f"throughput             {format_rate(result.images_per_second, 'images')}")
    print(f"sent per rank and step {format_bytes(result.bytes_sent_per_step)}")
    print(f"peak memory per rank   {format_bytes(result.peak_memory_bytes)}")
    say(f"next: hpcdl train --model {result.model} --data DIR --strategy {result.strategy} --ranks {result.ranks}")
