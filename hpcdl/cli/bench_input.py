"""`hpcdl bench input`: how fast a data folder feeds a rank."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.options import JsonFlag
from hpcdl.cli.output import print_json, print_table, say
from hpcdl.core.units import format_bytes, format_count, format_seconds

EPILOG = "Example: hpcdl bench input shards --batch-size 64 --step-ms 120"


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
        print(f"\nsteps of {step_ms:g} ms wait {result.waiting_fraction:.1%} of the time for input")
        print(f"accelerator utilisation {result.accelerator_utilisation:.1%}: {verdict}")
    say(f"next: hpcdl train --model lenet --data {data} --batch-size {batch_size}")
