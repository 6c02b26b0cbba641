"""`hpcdl evaluate` and `hpcdl export`: measure and export a run's trained model."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hpcdl.cli.options import JsonFlag, QuietFlag, TrustFlag
from hpcdl.cli.output import Commentary, print_json, put, say
from hpcdl.core.paths import typed
from hpcdl.core.units import counted, format_measure

RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


_TOP = 5


class Form(StrEnum):
    """The formats for export."""

    KERAS = "keras"
    SAVEDMODEL = "savedmodel"


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command(epilog="Example: hpcdl evaluate runs/20260314-lenet-ring --data shards")(evaluate)
    app.command(epilog="Example: hpcdl export runs/20260314-lenet-ring --to savedmodel served")(export)


def evaluate(
    run: RunArgument,
    data: Annotated[str, typer.Option("--data", metavar="DIR", help="Folder made by `hpcdl shard`.")],
    split: Annotated[str | None, typer.Option("--split", help="Part of it: test, else val, else train.")] = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
    trust: TrustFlag = False,
) -> None:
    """Measure a run's model on data."""
    from hpcdl.run.rundir import check_trusted
    from hpcdl.supervision import runtime

    check_trusted(run, trust)
    runtime.import_tensorflow()
    from hpcdl.rank.outputs import evaluate_run

    result, name, remarks = evaluate_run(run, data, split)
    for text in remarks:
        say(text)
    if json:
        of_result = {"split": name, "loss": result.loss, "num_samples": result.num_samples, **result.metrics}
        warnings = [text.removeprefix("warning: ") for text in remarks if text.startswith("warning: ")]
        print_json({**of_result, "warnings": warnings})
        return
    from hpcdl.data.format.dataset import open_dataset

    values = worth_printing({"loss": result.loss, **result.metrics}, len(open_dataset(data).class_names))
    metrics = ", ".join(f"{metric} {format_measure(value)}" for metric, value in values.items())
    put(f"{name}: {metrics} on {counted(result.num_samples, 'sample')}")
    target = Path(f"{run.resolve().name}-keras")
    Commentary(quiet=quiet).say(
        f"next: {typed('export', run, '--to', 'keras', target, *(['--trust'] if trust else []))}"
    )


def worth_printing(values: Mapping[str, float], num_classes: int) -> dict[str, float]:
    """Return the values without a top-5 accuracy that is 1 for any model, because there are no more classes."""
    return {
        name: value
        for name, value in values.items()
        if name.rpartition("/")[2] != "top5_accuracy" or value < 1 or num_classes > _TOP
    }


def export(
    run: RunArgument,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write to.")],
    to: Annotated[Form, typer.Option("--to", help="Format.")] = Form.KERAS,
    json: JsonFlag = False,
    trust: TrustFlag = False,
) -> None:
    """Write a run's model for use without hpcdl."""
    from hpcdl.run.rundir import check_trusted
    from hpcdl.supervision import runtime

    check_trusted(run, trust)
    runtime.import_tensorflow()
    from hpcdl.rank.outputs import export_run

    path, remarks = export_run(run, to.value, target)
    for text in remarks:
        say(text)
    if json:
        print_json({"path": str(path), "format": to.value})
        return
    put(str(path))
    readers = {Form.KERAS: "keras.saving.load_model", Form.SAVEDMODEL: "tf.saved_model.load"}
    say(f"next: in Python, {readers[to]}({str(path)!r})")
