"""The table of commands, in the order in which a study uses them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from hpcdl import __version__
from hpcdl.cli.data import inspect, shard
from hpcdl.cli.node import node, tune_threads
from hpcdl.cli.output import VERBOSE, put
from hpcdl.cli.site import certify, config, docs, doctor, jobs, models, strategies, submit
from hpcdl.cli.study import bench, predict, report, search, sweep
from hpcdl.cli.training import checkpoints, evaluate, run, runs, trace, train, watch

app = typer.Typer(
    name="hpcdl",
    help="Distributed deep learning for HPC centres: shard data, tune a node, train over MPI, report how it scales.",
    epilog="Example: hpcdl train --model lenet --data shards --strategy ring --ranks 2 --epochs 5",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        put(f"hpcdl {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks and TensorFlow's own log.")] = False,
) -> None:
    """Distributed deep learning for HPC centres: shard data, tune a node, train over MPI, report how it scales."""
    if verbose:
        os.environ[VERBOSE] = "1"


for module in (
    shard,
    inspect,
    tune_threads,
    node,
    train,
    sweep,
    search,
    predict,
    run,
    runs,
    watch,
    checkpoints,
    evaluate,
    submit,
    jobs,
    report,
    trace,
    bench,
    models,
    strategies,
    config,
    doctor,
    certify,
    docs,
):
    module.register(app)
