"""`hpcdl bench allreduce`: hung under `hpcdl bench` by cli/bench.py."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import typer

from hpcdl.cli.options import ConfigFlag, JsonFlag, SetFlag, effective, takes_settings
from hpcdl.cli.output import print_json, print_table, say
from hpcdl.config.bench_allreduce import AllreduceBenchConfig
from hpcdl.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from hpcdl.bench.allreduce import AllreduceResult, AllreduceRow


def register(commands: typer.Typer) -> None:
    """Add the command."""
    commands.command(epilog="Example: hpcdl bench allreduce --ranks 2 --sizes 4KiB,1MiB,25MiB")(allreduce)


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
    _print(result)
    slowest = result.slowest_pair
    pair = " and ".join(f"{rank} ({host})" for rank, host in zip(slowest.ranks, slowest.hosts, strict=True))
    say(f"slowest pair: ranks {pair}, {format_seconds(slowest.seconds)} for 1 MiB, {slowest.ratio:.2f} x the median")
    say(f"next: hpcdl train --model resnet50 --data DIR --strategy auto --ranks {result.ranks}")


def _print(result: AllreduceResult) -> None:
    best: dict[int, AllreduceRow] = {}
    for row in result.rows:
        if row.bytes not in best or row.seconds < best[row.bytes].seconds:
            best[row.bytes] = row
    print(f"{result.library}, {result.ranks} ranks on {result.nodes} nodes; every sum was checked on every rank")
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
    print()
    links = {"one link": result.link, **result.fits}
    print_table(
        ["time = alpha + beta n", "alpha", "1/beta GB/s"],
        [
            [name, format_seconds(fit.latency_s), f"{fit.bytes_per_second / 1e9:.2f}" if fit.bytes_per_second else "-"]
            for name, fit in links.items()
        ],
    )
