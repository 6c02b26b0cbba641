"""`hpcdl bench precision`: how bfloat16 changes results, compared with float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcdl.config.schema import PrecisionBenchConfig
from hpcdl.data.format.dataset import open_dataset
from hpcdl.models.table import check_model_spec

FLOAT32 = "float32"


@dataclass(frozen=True, kw_only=True)
class DigitsResult:
    """Accuracies on held-out digits by precision, one for each of `seeds`, after `epochs` of LeNet."""

    network: str
    epochs: int
    seeds: Sequence[int]
    accuracy: Mapping[str, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class PrecisionResult:
    """Largest differences on one batch, over the largest float32 value of their kind; `variable` differs most."""

    model: str
    batch_size: int
    precision: str
    outputs: float
    gradients: float
    variable: str
    digits: DigitsResult


def run(config: PrecisionBenchConfig, on_progress: Callable[[float, str], None]) -> PrecisionResult:
    """Compare in this process; `on_progress` gets how many of `num_parts` are done."""
    settings = config.run
    check_model_spec(settings.model)
    dataset = open_dataset(str(settings.data)) if settings.data else None
    from hpcdl.supervision import runtime

    runtime.import_tensorflow()
    from hpcdl.models.load import load_model
    from hpcdl.step import measure as precision
    from hpcdl.step.measure import made_up_batches

    runtime.configure(deterministic=False, seed=settings.seed)
    on_progress(0, "one batch")
    classes = settings.classes or (dataset.num_classes if dataset else None)
    shape = dataset.sample_shape if dataset else None
    model = load_model(settings.model, classes=classes, input_shape=shape)
    if dataset is None:
        batch = next(made_up_batches(model, settings.batch_size, settings.seed))
    else:
        from hpcdl.data.read.pipeline import training_batches

        stream = training_batches(dataset, batch_size=settings.batch_size, worker=0, num_workers=1, seed=settings.seed)
        batch = next(iter(stream))
        stream.close()
    differences = precision.compare(
        lambda: load_model(settings.model, classes=classes, input_shape=shape), batch, settings.precision
    )
    accuracy: dict[str, list[float]] = {FLOAT32: [], settings.precision: []}
    seeds = range(settings.seed, settings.seed + settings.repeats)
    for number, seed in enumerate(seeds):
        on_progress(1 + number, "digits")
        # Both precisions with each seed: seeds differ more than precisions may.
        for name, reached in accuracy.items():
            reached.append(precision.digits_accuracy(name, epochs=settings.epochs, seed=seed))
    return PrecisionResult(
        model=settings.model,
        batch_size=settings.batch_size,
        precision=settings.precision,
        **dataclasses.asdict(differences),
        digits=DigitsResult(
            network=precision.DIGITS_NETWORK, epochs=settings.epochs, seeds=list(seeds), accuracy=accuracy
        ),
    )


def num_parts(config: PrecisionBenchConfig) -> int:
    """Return the total of the progress bar."""
    return 1 + config.run.repeats
