"""`hpcdl bench`: measurements on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import ConfigFlag, JsonFlag, SetFlag, effective, takes_settings
from hpcdl.cli.output import print_json, print_table, put, say
from hpcdl.config.schema import AllreduceBenchConfig, StepBenchConfig
from hpcdl.core.units import format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from hpcdl.bench.allreduce import AllreduceResult, AllreduceRow

commands = typer.Typer(no_args_is_help=True, help="Measure all-reduces, a step, or the input.")


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(commands, name="bench")


@commands.command(
    cls=GroupedCommand, epilog="Example: hpcdl bench step --model resnet50 --batch-size 8 --ranks 2 --strategy ring"
)
@takes_settings(StepBenchConfig)
def step(flags: dict[str, Any], config: ConfigFlag = None, set_: SetFlag = None, json: JsonFlag = False) -> None:
    """Time a model's step with and without the exchange of gradients."""
    from hpcdl.bench.step import run

    result = run(effective(StepBenchConfig, "bench-step", flags, config, set_).config)
    if json:
        print_json(dataclasses.asdict(result))
        return
    put(f"step                   {format_seconds(result.step_seconds)}")
    if result.compute_seconds is not None:
        put(f"  compute              {format_seconds(result.compute_seconds)}")
    if result.exposed_communication_seconds is not None:
        put(f"  exposed exchange     {format_seconds(result.exposed_communication_seconds)}")
    if result.efficiency is not None:
        put(f"efficiency             {result.efficiency:.3f}")
    put(f"throughput             {format_rate(result.images_per_second, 'images')}")
    sent = result.bytes_sent_per_step
    put(f"sent per rank and step {'unknown' if sent is None else format_bytes(sent)}")
    put(f"peak memory per rank   {format_bytes(result.peak_memory_bytes)}")
    say(f"next: hpcdl train --model {result.model} --data DIR --strategy {result.strategy} --ranks {result.ranks}")


@commands.command(cls=GroupedCommand, epilog="Example: hpcdl bench allreduce --ranks 2 --sizes 4KiB,1MiB,25MiB")
@takes_settings(AllreduceBenchConfig)
def allreduce(flags: dict[str, Any], config: ConfigFlag = None, set_: SetFlag = None, json: JsonFlag = False) -> None:
    """Time and check every all-reduce at several sizes, and every link between two ranks."""
    from hpcdl.bench.allreduce import run

    result = run(effective(AllreduceBenchConfig, "bench-allreduce", flags, config, set_).config)
    if result is None:  # one of the ranks that a launcher started; rank 0 speaks
        return
    if json:
        print_json(dataclasses.asdict(result))
        return
    _print_allreduce(result)
    slowest = result.slowest_pair
    pair = " and ".join(f"{rank} ({host})" for rank, host in zip(slowest.ranks, slowest.hosts, strict=True))
    say(f"slowest pair: ranks {pair}, {format_seconds(slowest.seconds)} for 1 MiB, {slowest.ratio:.2f} x the median")
    say(f"next: hpcdl train --model resnet50 --data DIR --strategy auto --ranks {result.ranks}")


def _print_allreduce(result: AllreduceResult) -> None:
    best: dict[int, AllreduceRow] = {}
    for row in result.rows:
        if row.bytes not in best or row.seconds < best[row.bytes].seconds:
            best[row.bytes] = row
    put(f"{result.library}, {result.ranks} ranks on {result.nodes} nodes; every sum was checked on every rank")
    print_table(
        ["size", "algorithm", "time", "bus GB/s", "of bound", ""],
        [
            [
                format_bytes(row.bytes),
                row.algorithm,
                format_seconds(row.seconds),
                f"{row.bus_bandwidth / 1e9:.2f}",
                f"{row.share_of_bound:.2f}",
                "<- auto" if best[row.bytes] is row else "",
            ]
            for row in result.rows
        ],
    )
    put()
    links = {"one link": result.link, **result.fits}
    print_table(
        ["time = alpha + beta n", "alpha", "1/beta GB/s"],
        [
            [name, format_seconds(fit.latency_s), f"{fit.bytes_per_second / 1e9:.2f}" if fit.bytes_per_second else "-"]
            for name, fit in links.items()
        ],
    )


@commands.command(name="input", epilog="Example: hpcdl bench input shards --batch-size 64 --step-ms 120")
def input_command(
    data: Annotated[str, typer.Argument(metavar="DIR", help="Folder made by `hpcdl shard`, or synthetic:NAME.")],
    batch_size: Annotated[int, typer.Option("--batch-size", metavar="N", min=1, help="Samples per batch.")] = 32,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Batches to time.")] = 100,
    step_ms: Annotated[
        float | None, typer.Option("--step-ms", metavar="X", min=0, help="Time of a training step, in milliseconds.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", min=0, help="Seed of the order.")] = 0,
    stage: Annotated[
        Path | None, typer.Option("--stage", metavar="DIR", help="Copy the shards to this node-local folder first.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Time the input pipeline, and say what part of a training step would wait for it."""
    from hpcdl.training.session import runtime

    runtime.silence()
    runtime.import_tensorflow()
    from hpcdl.bench.input import PASS_LINE, measure_input
    from hpcdl.data.dataset import open_dataset
    from hpcdl.data.read.staging import staged

    dataset = open_dataset(data)
    with staged(dataset, stage) if stage else contextlib.nullcontext(dataset) as near:
        result = measure_input(
            near, batch_size=batch_size, steps=steps, step_seconds=step_ms / 1000 if step_ms else None, seed=seed
        )
    if json:
        print_json(dataclasses.asdict(result))
        return
    rows = [
        (
            name,
            format_count(rates.samples_per_second),
            f"{format_bytes(rates.bytes_per_second)}/s",
            *(format_seconds(value) for value in rates.batch_seconds.values()),
        )
        for name, rates in (("as stored", result.stored), ("as delivered", result.delivered))
    ]
    print_table(("what", "samples/s", "rate", *(f"batch {level}" for level in result.stored.batch_seconds)), rows)
    if result.accelerator_utilisation is not None and result.waiting_fraction is not None:
        verdict = "enough" if result.passes else f"too little: {PASS_LINE:.0%} is the line of MLPerf Storage"
        put(f"\nsteps of {step_ms:g} ms wait {result.waiting_fraction:.1%} of the time for input")
        put(f"accelerator utilisation {result.accelerator_utilisation:.1%}: {verdict}")
    say(f"next: hpcdl train --model lenet --data {data} --batch-size {batch_size}")
