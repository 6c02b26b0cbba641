"""`hpcdl predict`: forecasts for larger sizes, before node-hours are spent."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdl.cli.options import ImportFlag, JsonFlag, MachineFlag, NetworkFlag
from hpcdl.cli.output import print_json, print_table, put, say, say_beside
from hpcdl.core.errors import UsageError
from hpcdl.core.paths import quoted
from hpcdl.core.progress import progress
from hpcdl.core.units import NOT_BOUNDED, counted, format_half_width, format_seconds, format_seconds_interval

if TYPE_CHECKING:
    from hpcdl.predict.answer import Answer, ServerChoice
    from hpcdl.predict.forecast import Prediction, Range
    from hpcdl.predict.jobs import StepJob
    from hpcdl.report.runs.sources import Gathered

MOST_NODES = 1 << 20

Runs = Annotated[
    list[Path] | None, typer.Argument(metavar="[RUN...]", help="Run directories, or folders of run directories.")
]
Nodes = Annotated[str, typer.Option("--nodes", metavar="N,N", help="Sizes to predict. [powers of two, to 16 x]")]
Strategy = Annotated[
    str, typer.Option("--strategy", metavar="NAME,NAME", help="Strategies. [those that were run, and usual ones]")
]
Batch = Annotated[int | None, typer.Option("--batch-size", metavar="N", help="Samples per worker and step. [as run]")]
Servers = Annotated[int | None, typer.Option("--servers", metavar="N", help="Ranks that serve. [as run]")]
Placement = Annotated[
    str | None,
    typer.Option(
        "--placement", metavar="NAME", help="How variables are spread over servers: round-robin, greedy or split."
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="NAME|FILE", help="Network, if no run names it: FILE.keras, FILE.py:FUNCTION."),
]
Target = Annotated[str | None, typer.Option("--target", metavar="PCT", help="Also the time to this accuracy: 97%.")]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Also write predict.json and figures here.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: hpcdl predict runs --nodes 8,16,64 --strategy ring,ps --target 97%")(predict)


def predict(
    runs: Runs = None,
    imported: ImportFlag = None,
    nodes: Nodes = "",
    strategy: Strategy = "",
    batch_size: Batch = None,
    servers: Servers = None,
    placement: Placement = None,
    network: NetworkFlag = None,
    machine: MachineFlag = None,
    model: Model = None,
    target: Target = None,
    out: Out = None,
    json: JsonFlag = False,
) -> None:
    """Predict steps at sizes not yet run, with 90 % intervals.

    From a few small runs, from one node and a network, or from a model and a machine alone.
    """
    from hpcdl.core.storage.disk import check_output_folder, check_outputs
    from hpcdl.launch.traced import traced_runs
    from hpcdl.predict.answer import Question, answer, check

    others = check_output_folder(out) if out else []
    check_outputs([out / "predict.json"] if out else [])
    for flag, value in (("--batch-size", batch_size), ("--servers", servers)):
        if value is not None and not 1 <= value <= MOST_NODES:
            raise UsageError(f"{flag} {value}: give a whole number from 1 to {MOST_NODES}")
    question = Question(
        nodes=_counts(nodes), strategies=tuple(_words(strategy)), batch=batch_size, servers=servers,
        placement=_placement(placement), network=network, machine=machine, model=model, target=_share(target),
    )  # fmt: skip
    check(question)  # before the records are read, which takes longest
    gathered = _gather(runs or [], imported)
    forecast = answer(question, gathered.runs, traced_runs(gathered.run_dirs, say), dict(gathered.run_dirs))
    complete = dataclasses.replace(forecast, warnings=(*gathered.unreadable, *gathered.remarks, *forecast.warnings))
    if out is not None:
        say_beside(out, others)
        _write(complete, out)
    if json:
        print_json(complete.as_json())
        return
    _print(forecast)
    _print_next(forecast)


def _gather(runs: Sequence[Path], imported: tuple[str, Path] | None) -> Gathered:
    from hpcdl.report.runs.imported import gather_with

    gathered = gather_with(runs, imported, progress("reading records", 1))
    for line in (*gathered.unreadable, *gathered.remarks):
        say(f"warning: {line}")
    return gathered


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _counts(text: str) -> tuple[int, ...]:
    counts = []
    for word in _words(text):
        if not word.isdecimal() or not 1 <= int(word) <= MOST_NODES:
            raise UsageError(f"--nodes {text}: {word!r} is not a number of nodes; write for example 8,16,64")
        counts.append(int(word))
    return tuple(sorted(set(counts)))


def _placement(name: str | None) -> str | None:
    placements = ("round-robin", "greedy", "split")
    if name is not None and name not in placements:
        raise UsageError(f"--placement {name}: known are {', '.join(placements)}")
    return name


def _share(text: str | None) -> float | None:
    from hpcdl.config.settings import accuracy

    try:
        return None if text is None else accuracy(text)
    except ValueError as error:
        raise UsageError(f"--target: {error}") from None


def _write(answer: Answer, out: Path) -> None:
    from hpcdl.core.storage.files import json_text, write_output
    from hpcdl.predict.outlook import draw

    document = answer.as_json()
    paths = draw(document["predictions"], out, answer.counted)
    write_output(out / "predict.json", json_text(document))
    say(f"written: {', '.join([quoted(out / 'predict.json'), *(path.name for path in paths)])}")


def _print(answer: Answer) -> None:
    models = list(dict.fromkeys(item.job.model for item in answer.predictions))
    for model in models:
        rows = [item for item in answer.predictions if item.job.model == model]
        put(f"{model}, {_batches(rows)}: a step and its limits")
        known = [item for item in rows if item.step_seconds.bounded]
        if known:
            print_table(
                ("strategy", "nodes", "workers", "step", "90 %", "effic.", "limited by"),
                [_cells(item) for item in known],
            )
            put(_bases(known))
        for line in _not_bounded(rows):
            put(textwrap.fill(line, 79, subsequent_indent="  "))
        if any(item.marks for item in rows):
            put("* trust it less: the last lines say why")
        _print_best(rows)
    for tests in answer.held_out.values():
        for item in tests:
            put(f"held out: {item.strategy} on {counted(item.workers, 'worker')} took {format_seconds(item.measured)}")
            inside = "inside" if item.covered else "outside"
            guess = f"{format_seconds(item.predicted)} ({100 * item.error:+.1f} %, {inside} its interval)"
            put(f"  predicted from smaller sizes: {guess}")
    for line in _reasons(answer.predictions):
        put(textwrap.fill(line, 79, subsequent_indent="  ", break_on_hyphens=False))
    for line in _crossings(answer):
        put(line)
    for warning in answer.warnings:
        put(textwrap.fill(f"! {warning}", 79, subsequent_indent="  ", break_on_hyphens=False))


def _batches(rows: Sequence[Prediction]) -> str:
    batches = {prediction.job.batch for prediction in rows}
    if len(batches) == 1:
        return f"{batches.pop():g} samples per worker"
    whole = {round(prediction.job.batch * prediction.job.workers) for prediction in rows}
    return (
        f"{whole.pop()} samples in all"
        if len(whole) == 1
        else f"{min(batches):g} to {max(batches):g} samples per worker"
    )


def _not_bounded(rows: Sequence[Prediction]) -> list[str]:
    """Return a line for each strategy with the sizes of which the runs say nothing."""
    sizes: dict[str, list[str]] = {}
    for prediction in rows:
        if not prediction.step_seconds.bounded:
            sizes.setdefault(label_with_servers(prediction.job), []).append(str(prediction.job.nodes))
    return [
        f"{NOT_BOUNDED} by these runs: {name} on {', '.join(nodes)} {'node' if nodes == ['1'] else 'nodes'} *"
        for name, nodes in sizes.items()
    ]


def label_with_servers(job: StepJob) -> str:
    """Return the strategy's name, and the number of its servers if it has any."""
    return f"{job.label}/{job.servers}" if job.servers else job.label


def _cells(prediction: Prediction) -> tuple[str, ...]:
    job = prediction.job
    mark = " *" if prediction.marks else ""
    limit = {"compute noise": "noise"}.get(prediction.limited_by, prediction.limited_by)
    size, step = (label_with_servers(prediction.job), str(job.nodes), str(job.workers)), prediction.step_seconds
    return (*size, format_seconds(step.mean), _ends(step), _efficiency(prediction.efficiency), limit + mark)


def _efficiency(interval: Range) -> str:
    low, high = f"{100 * interval.low:.0f}", f"{100 * interval.high:.0f}"
    return f"{low} %" if low == high else f"{low}-{high} %"


def _bases(rows: Sequence[Prediction]) -> str:
    """Return what efficiencies are relative to: one strategy's base makes another's exceed 100 %."""
    bases = {f"{label_with_servers(row.base)} with {counted(row.base.workers, 'worker')}" for row in rows}
    against = bases.pop() if len(bases) == 1 else "the fewest workers measured, for each strategy its own"
    return f"effic. is a 90 % interval of a worker's throughput against {against}"


def _ends(interval: Range) -> str:
    return format_seconds_interval(interval.mean, interval.low, interval.high)


def _print_best(rows: Sequence[Prediction]) -> None:
    """Print for each size the strategy with the most samples per second, and the cost of an epoch with it."""
    rows = [prediction for prediction in rows if prediction.step_seconds.bounded]
    if not rows or rows[0].epoch_seconds is None:
        return
    aimed = rows[0].target_seconds is not None
    cells = []
    for nodes in sorted({prediction.job.nodes for prediction in rows}):
        of_size = [prediction for prediction in rows if prediction.job.nodes == nodes]
        best = max(of_size, key=lambda prediction: prediction.images_per_second.mean)
        num_close = sum(one.images_per_second.high > best.images_per_second.low for one in of_size)
        doubt = " ?" if num_close > 1 else ""
        assert best.epoch_seconds is not None and best.epoch_node_hours is not None
        gain = max(best.faster, key=lambda part: best.faster[part] if part != "node" else -1.0)
        target = [format_seconds(best.target_seconds.mean)] if best.target_seconds else []
        cells.append(
            (str(nodes), best.job.label + doubt, format_seconds(best.epoch_seconds.mean), _ends(best.epoch_seconds),
             f"{best.epoch_node_hours.mean:.3g}", *target, f"{gain} -{100 * best.faster[gain]:.0f} %")
        )  # fmt: skip
    put()
    several = len({prediction.job.label for prediction in rows}) > 1
    which = "the best of them (? others are not distinguishable from it): " if several else ""
    put(textwrap.fill(f"{which}an epoch, node-hours, and what halving one cost would save", 79))
    target_title = ("to target",) if aimed else ()
    print_table(("nodes", "best" if several else "strategy", "epoch", "90 %", "node-h", *target_title, "halved"), cells)


def _reasons(rows: Sequence[Prediction]) -> list[str]:
    """Return the models behind each strategy's intervals, with their probabilities given the held-out sizes."""
    lines = []
    for prediction in {prediction.job.label: prediction for prediction in rows if len(prediction.models) > 1}.values():
        shares = sorted(prediction.models.items(), key=lambda pair: -pair[1])
        text = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares)
        lines.append(f"{prediction.job.label}: models by held-out sizes: {text}; beyond them the model error grows")
    return lines


def _crossings(answer: Answer) -> list[str]:
    lines = []
    for row in answer.crossings:
        if row["what"] == "best strategy":
            similar = ", ".join(row["not_distinguishable"])
            rank = "perhaps best" if similar else "best"
            lines.append(f"{rank} from {counted(row['nodes'], 'node')}: {row['strategy']}")
            lines += [f"  not distinguishable from it: {similar}"] if similar else []
        elif row["nodes"] is not None:
            low, high = ("beyond" if row[key] is None else str(row[key]) for key in ("low", "high"))
            lines.append(
                f"{row['strategy']}: efficiency below 80 % from {counted(row['nodes'], 'node')} [{low}, {high}]"
            )
    return lines + [_server_line(choice) for choice in answer.best_servers[-1:]]


def _server_line(choice: ServerChoice) -> str:
    placed = f", placement {choice.placement}" if choice.placement else ""
    rank, close = "best", ""
    if choice.not_distinguishable:
        rank = "perhaps best"
        close = f"\n  not distinguishable from it: {', '.join(map(str, choice.not_distinguishable))}"
    where = f"{rank} on {counted(choice.nodes, 'node')} for {choice.strategy}"
    return f"{where}: {counted(choice.servers, 'server')}{placed}{close}"


def _print_next(answer: Answer) -> None:
    run = answer.next_run
    if run is None:
        return
    say(f"next: {run.command}")
    widths = f"from {format_half_width(run.width)} to {format_half_width(run.width_after)}"
    say(f"      narrows the widest interval asked for, {widths}")
