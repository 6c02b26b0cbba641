"""`hpcdl bench`: measurements on this machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpcdl.cli.data import train_on
from hpcdl.cli.groups import GroupedCommand
from hpcdl.cli.options import ConfigFlag, JsonFlag, SetFlag, as_flag, resolved, takes_settings
from hpcdl.cli.output import print_json, print_table, put, say
from hpcdl.config.load import ResolvedConfig, flatten, settings_by_key
from hpcdl.config.schema import (
    AllreduceBenchConfig,
    InputBenchConfig,
    PingpongBenchConfig,
    PrecisionBenchConfig,
    StepBenchConfig,
    TrainConfig,
)
from hpcdl.core.paths import typed
from hpcdl.core.progress import progress
from hpcdl.core.units import counted, format_bytes, format_count, format_rate, format_seconds

if TYPE_CHECKING:
    from hpcdl.bench.allreduce import AllreduceResult, AllreduceRow, SlowestPair
    from hpcdl.bench.input import InputResult, MetadataOperations
    from hpcdl.bench.step import StepResult

_NOT_SURE = "not distinguishable"
_OF_THE_MEASUREMENT = ("steps", "warmup-steps")
"""Settings of `bench step` that mean something else in `train`."""
commands = typer.Typer(no_args_is_help=True, help="Measure all-reduces, links, a step, input, a precision.")


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

    wanted = resolved(StepBenchConfig, "bench-step", flags, config, set_)
    result = run(wanted, _say_if_crowded)
    if result is None:  # a rank that a launcher started; rank 0 prints
        return
    for warning in result.warnings:
        say(f"warning: {warning}")
    if json:
        print_json(dataclasses.asdict(result))
        return
    _print_step(result)
    put(f"throughput             {format_rate(result.images_per_second, result.counted)}")
    sent = result.bytes_sent_per_step
    put(f"sent per rank and step {'unknown' if sent is None else format_bytes(sent)}")
    put(f"peak memory per rank   {format_bytes(result.peak_memory_bytes)}")
    put(f"fast kernels           {', '.join(result.fast_kernels) or 'none'}")
    say(f"next: {_train_as_measured(wanted, result)}")


def _say_if_crowded(num_ranks: int) -> None:
    from hpcdl.bench.ranks import crowded

    if warning := crowded(num_ranks):
        say(f"warning: {warning}")


def _print_step(result: StepResult) -> None:
    """Print the step and its parts; a difference that the steps do not show is none to report."""
    put(f"step                   {format_seconds(result.step_seconds)}{_middle_half(result.step_middle_half)}")
    if result.compute_seconds is not None:
        half = _middle_half(result.compute_middle_half)
        put(f"  compute              {format_seconds(result.compute_seconds)}{half}")
    doubt = "" if result.distinguishable else f" ({_NOT_SURE} from {{}})"
    if result.exposed_communication_seconds is not None:
        put(f"  exposed exchange     {format_seconds(result.exposed_communication_seconds)}{doubt.format('none')}")
    if result.efficiency is not None:
        put(f"efficiency             {result.efficiency:.3f}{doubt.format('1')}")
        kinds = f"{counted(result.steps, 'step')} of each kind, in one start"
        put(f"by {kinds} (medians; Mann-Whitney); repeat it before you compare two settings")


def _middle_half(ends: Sequence[float]) -> str:
    return f" (middle half {' to '.join(map(format_seconds, ends))})" if ends else ""


def _train_as_measured(wanted: ResolvedConfig[StepBenchConfig], result: StepResult) -> str:
    """Return the command that trains what was measured; for a network whose samples are unknown, that tunes it."""
    from hpcdl.run.trained_data import made_up_data

    data, made_up = wanted.config.run.data, made_up_data(result.model)
    if data is None and made_up is None:
        return typed("tune-threads", "--model", result.model, "--batch-size", result.batch_size)
    samples: list[object] = ["--data", made_up, "--steps", 20] if data is None else ["--data", data]
    words: list[object] = ["train", "--model", result.model, *samples]
    words += ["--strategy", result.strategy, "--ranks", result.ranks, "--batch-size", result.batch_size]
    known, values = settings_by_key(TrainConfig), flatten(wanted.config)
    given = [key for key, origin in wanted.origins.items() if origin != "default" and key in known]
    for key in given:
        if key not in _OF_THE_MEASUREMENT and f"--{key}" not in words:
            words += as_flag(known[key], values[key])
    return typed(*words)


@commands.command(cls=GroupedCommand, epilog="Example: hpcdl bench allreduce --ranks 2 --sizes 4KiB,1MiB,25MiB")
@takes_settings(AllreduceBenchConfig)
def allreduce(flags: dict[str, Any], config: ConfigFlag = None, set_: SetFlag = None, json: JsonFlag = False) -> None:
    """Time and check all-reduces at several sizes. Links between each two ranks are timed too."""
    from hpcdl.bench.allreduce import fewest_calls, run
    from hpcdl.collectives.auto import LARGE_BYTES, SMALL_BYTES, serves_auto

    result = run(resolved(AllreduceBenchConfig, "bench-allreduce", flags, config, set_).config, _say_if_crowded)
    if result is None:  # a rank that a launcher started; rank 0 prints
        return
    serves = serves_auto([row.bytes for row in result.rows])
    if not serves:
        ends = f"{format_bytes(SMALL_BYTES)} or less to {format_bytes(LARGE_BYTES)} or more"
        say(f"these times are not kept for --strategy auto, which needs sizes from {ends}")
    if result.repeats < (fewest := fewest_calls(len({row.algorithm for row in result.rows}))):
        say(f"{counted(result.repeats, 'call')} of each cannot show which is fastest: give --repeats {fewest} or more")
    if json:
        print_json(dataclasses.asdict(result))
        return
    _print_allreduce(result, _OF_AUTO if serves else "<- fastest")
    say(_slowest_pair(result.slowest_pair, result.ranks))
    say(
        "next: hpcdl train --model resnet50 --data synthetic:imagenet --steps 20 --strategy auto "
        f"--ranks {result.ranks}"
    )


def _slowest_pair(slowest: SlowestPair, num_ranks: int) -> str:
    pair = " and ".join(f"{rank} ({host})" for rank, host in zip(slowest.ranks, slowest.hosts, strict=True))
    ends = (slowest.low_seconds, slowest.high_seconds)
    time = f"ranks {pair}, {format_seconds(slowest.seconds)}{_middle_half(ends)} for 1 MiB"
    if num_ranks == 2:
        return f"the only pair: {time}"
    doubt = "" if slowest.distinguishable else f" ({_NOT_SURE} from it)"
    return f"slowest pair, timed again: {time}, {slowest.ratio:.2f} x the median pair{doubt}"


_OF_AUTO = "<- auto"
"""Marks the algorithm that `--strategy auto` takes: the one with the least time, however close the others are."""


def _print_allreduce(result: AllreduceResult, mark: str) -> None:
    size = f"{counted(result.ranks, 'rank')} on {counted(result.nodes, 'node')}"
    put(f"{result.library}, {size}; every sum was checked on every rank")
    print_table(
        ["size", "algorithm", "time", "middle half", "bus GB/s", "of bound", ""],
        [
            [
                format_bytes(row.bytes),
                row.algorithm,
                format_seconds(row.seconds),
                f"{format_seconds(row.low_seconds)} to {format_seconds(row.high_seconds)}",
                f"{row.bus_bandwidth / 1e9:.2f}",
                f"{row.share_of_bound:.2f}",
                _mark(row, [other for other in result.rows if other.bytes == row.bytes], mark),
            ]
            for row in result.rows
        ],
    )
    put(f"time: median of {counted(result.repeats, 'call')} on the slowest rank; a busy node changes it")
    put("middle half: from the first to the third quartile of the calls")
    put(f"{_NOT_SURE}: from the fastest of its size, by these calls (Mann-Whitney, Holm)")
    put("of bound: the time of one link for these bytes, over the time. It is above 1 where")
    put("  ranks of a node exchange more than one link carries, or other programs slowed the link")
    put()
    links = {"one link": result.link, **result.fits}
    print_table(
        ["time = alpha + beta n", "alpha", "1/beta GB/s"],
        [
            [name, format_seconds(fit.latency_s), f"{fit.bytes_per_second / 1e9:.2f}" if fit.bytes_per_second else "-"]
            for name, fit in links.items()
        ],
    )


def _mark(row: AllreduceRow, of_size: Sequence[AllreduceRow], mark: str) -> str:
    """Return `mark` for the least time, unless it names the fastest and the calls do not distinguish it from others."""
    least = row is min(of_size, key=lambda other: other.seconds)
    if sum(other.perhaps_fastest for other in of_size) == 1:
        return mark if least else ""
    words = [mark] if least and mark == _OF_AUTO else []
    return ", ".join([*words, *([_NOT_SURE] if row.perhaps_fastest else [])])


@commands.command(cls=GroupedCommand, epilog="Example: hpcdl bench pingpong --transport grpc --allow-grpc")
@takes_settings(PingpongBenchConfig)
def pingpong(flags: dict[str, Any], config: ConfigFlag = None, set_: SetFlag = None, json: JsonFlag = False) -> None:
    """Time messages between two ranks. By MPI and by TensorFlow's gRPC, on the same link."""
    from hpcdl.bench.pingpong import run
    from hpcdl.cluster.batch.systems import has_own_nodes

    result = run(resolved(PingpongBenchConfig, "bench-pingpong", flags, config, set_).config)
    if result is None:  # a rank that a launcher started; rank 0 prints
        return
    for warning in result.warnings:
        say(f"warning: {warning}")
    if json:
        print_json(dataclasses.asdict(result))
        return
    first, second = (f"{rank} ({host})" for rank, host in zip(result.ranks, result.hosts, strict=True))
    put(f"{result.library}, one way between ranks {first} and {second}")
    print_table(
        ["size", "time", "rate", "n"],
        [
            [
                format_bytes(row.bytes),
                format_seconds(row.seconds),
                f"{format_bytes(row.bytes_per_second)}/s",
                str(row.repeats),
            ]
            for row in result.rows
        ],
    )
    if result.link is not None:
        speed = result.link.bytes_per_second
        rate = _rate(speed) if speed else "none: time does not grow with size"
        put(f"\ntime = alpha + beta n: alpha {format_seconds(result.link.latency_s)}, 1/beta {rate}")
    if result.call_seconds is not None:
        put(f"beside its messages a call of TensorFlow's session takes {format_seconds(result.call_seconds)}")
    allowed = "" if has_own_nodes(os.environ) else " --allow-grpc"
    say(f"next: hpcdl bench pingpong --transport {'mpi' if result.transport == 'grpc' else f'grpc{allowed}'}")


def _rate(bytes_per_second: float) -> str:
    return f"{format_bytes(bytes_per_second)}/s"


@commands.command(cls=GroupedCommand, epilog="Example: hpcdl bench precision --model resnet50 --batch-size 8")
@takes_settings(PrecisionBenchConfig)
def precision(flags: dict[str, Any], config: ConfigFlag = None, set_: SetFlag = None, json: JsonFlag = False) -> None:
    """Compare a network in bfloat16 with itself in float32. By one batch's results, and accuracy on bundled digits."""
    from hpcdl.bench.precision import num_parts, run

    settings = resolved(PrecisionBenchConfig, "bench-precision", flags, config, set_).config
    with progress("comparing", num_parts(settings)) as bar:
        result = run(settings, bar.update)
    if json:
        print_json(dataclasses.asdict(result))
        return
    put(f"{result.model}, one batch of {result.batch_size}, {result.precision} against float32")
    put(f"  outputs    differ by at most {result.outputs:.1e} of the largest")
    put(f"  gradients  differ by at most {result.gradients:.1e} of the largest, in {result.variable}")
    digits = result.digits
    put(f"accuracy of {digits.network} on the digits, {digits.epochs} epochs")
    rows = [[name, *(f"{value:.3f}" for value in reached)] for name, reached in digits.accuracy.items()]
    print_table(["precision", *(f"seed {seed}" for seed in digits.seeds)], rows)
    data, classes = settings.run.data, settings.run.classes
    options = ["--precision", result.precision, *([] if classes is None else ["--classes", classes])]
    if data is None:
        say(f"next: {typed('bench', 'step', '--model', result.model, '--batch-size', result.batch_size, *options)}")
    else:
        say(f"next: {typed('train', '--model', result.model, '--data', data, *options)}")


@commands.command(
    name="input", cls=GroupedCommand, epilog="Example: hpcdl bench input shards --batch-size 64 --step-ms 120 --ranks 4"
)
@takes_settings(InputBenchConfig)
def input_command(
    flags: dict[str, Any],
    data: Annotated[str, typer.Argument(metavar="DIR", help="Folder made by `hpcdl shard`, or synthetic:NAME.")],
    config: ConfigFlag = None,
    set_: SetFlag = None,
    json: JsonFlag = False,
) -> None:
    """Time the input of one rank, or of many at once. It says what part of a training step would wait for it."""
    from hpcdl.bench.input import run
    from hpcdl.data.format.dataset import open_dataset

    result = run(resolved(InputBenchConfig, "bench-input", flags, config, set_), data)
    if result is None:  # a rank that a launcher started; rank 0 prints
        return
    if json:
        print_json(dataclasses.asdict(result))
        return
    _print_input(result)
    options = ["--batch-size", result.batch_size, *(["--ranks", result.ranks] if result.ranks > 1 else [])]
    dataset = open_dataset(data)
    say(f"next: {train_on(data, dataset.sample_shape if dataset.pictures else None, *options)}")


def _print_input(result: InputResult) -> None:
    ways = (("as stored", result.stored), ("as delivered", result.delivered))
    rows = [
        (
            name,
            format_count(rates.samples_per_second),
            f"{format_bytes(rates.bytes_per_second)}/s",
            *(format_seconds(value) for value in rates.batch_seconds.values()),
        )
        for name, rates in ways
    ]
    if result.ranks > 1:
        nodes = f"{result.nodes} node{'' if result.nodes == 1 else 's'}"
        put(f"{result.ranks} ranks on {nodes} at once, batches of {result.batch_size} each")
    print_table(("what", "samples/s", "rate", *(f"batch {level}" for level in result.stored.batch_seconds)), rows)
    if result.ranks > 1:
        put()
        print_table(
            ("samples/s of a rank", "slowest", "of median", "median", "fastest", "slowest rank"),
            [
                (
                    name,
                    format_count(rates.slowest.samples_per_second),
                    f"{rates.slowest.of_median:.2f}",
                    format_count(rates.median_samples_per_second),
                    format_count(rates.fastest.samples_per_second),
                    f"{rates.slowest.rank} ({rates.slowest.host})",
                )
                for name, rates in ways
            ],
        )
    _print_utilisation(result)
    _print_metadata(result.metadata, result.ranks)


def _print_utilisation(result: InputResult) -> None:
    from hpcdl.bench.input import PASS_LINE

    worst = result.worst_utilisation
    if worst is None or result.step_seconds is None or result.waiting_fraction is None:
        return
    verdict = "enough" if result.passes else f"too little: {PASS_LINE:.0%} is the line of MLPerf Storage"
    put(f"\nsteps of {1000 * result.step_seconds:g} ms wait {result.waiting_fraction:.1%} of the time for input")
    mean = f"{result.accelerator_utilisation:.1%}"
    if result.ranks > 1:
        mean += f" on average, {worst.accelerator_utilisation:.1%} on rank {worst.rank} ({worst.host})"
    put(f"accelerator utilisation {mean}: {verdict}")


def _print_metadata(measured: MetadataOperations, num_ranks: int) -> None:
    """Print the counts of the rank with most operations, and of all ranks; nothing for data without files."""
    if not measured.start.all_ranks.total:
        return
    reached = "the first epoch" if measured.epochs >= 1 else f"the first {measured.epochs:.2g} of an epoch"
    parts = [("at the start", measured.start), (f"in {reached}", measured.first_epoch)]
    if measured.later_epoch is not None:
        parts.append(("in an epoch after it", measured.later_epoch))
    put()
    print_table(
        ("metadata operations of a rank", "opens", "stats", *(["of all ranks"] if num_ranks > 1 else [])),
        [
            (
                when,
                str(count.most_of_a_rank.opens),
                str(count.most_of_a_rank.stats),
                *([str(count.all_ranks.total)] if num_ranks > 1 else []),
            )
            for when, count in parts
        ],
    )
