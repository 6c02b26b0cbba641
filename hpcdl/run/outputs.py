"""Which loss and metrics belong to which target: read from the settings, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcdl.config.schema import CROSS_ENTROPY, ObjectiveConfig
from hpcdl.core.errors import UsageError, suggestion
from hpcdl.data.format.dataset import Dataset
from hpcdl.data.format.fields import Field

SHORT = {"mse": "mean_squared_error", "mae": "mean_absolute_error"}
"""What losses and metrics may also be called."""


def losses_of(config: ObjectiveConfig, names: Sequence[str]) -> dict[str, str]:
    """The loss of each target; UsageError where one has none, or two."""
    found = _by_target(config.loss, names, "--loss")
    for name in names:
        if len(found[name]) != 1:
            raise UsageError(f"--loss {config.loss}: the target {name!r} has {len(found[name])} losses; {_form(names)}")
    return {name: SHORT.get(own[0], own[0]) for name, own in found.items()}


def metrics_of(config: ObjectiveConfig, names: Sequence[str]) -> dict[str, list[str]]:
    """The metrics of each target, `mse` and `mae` by their long names."""
    found = _by_target(config.metrics, names, "--metrics")
    return {name: [SHORT.get(metric, metric) for metric in own] for name, own in found.items()}


def _by_target(text: str, names: Sequence[str], flag: str) -> dict[str, list[str]]:
    """The parts of `a,b` for the only target, or of `target=a,target=b`."""
    found: dict[str, list[str]] = {name: [] for name in names}
    for part in (part.strip() for part in text.split(",")):
        name, equals, value = part.rpartition("=")
        if not part:
            continue
        if not equals:
            if len(names) > 1:
                raise UsageError(f"{flag} {text}: the data has {len(names)} targets; {_form(names)}")
            name = names[0]
        if name not in found:
            raise UsageError(f"{flag} {text}: no target {name!r}{suggestion(name, names)}")
        found[name].append(value)
    return found


def _form(names: Sequence[str]) -> str:
    return "write " + ",".join(f"{name}=LOSS" for name in names)


def check_objective(config: ObjectiveConfig, dataset: Dataset) -> None:
    """UsageError where the loss does not fit the targets, or there is none for one."""
    losses = losses_of(config, [item.name for item in dataset.targets])
    metrics_of(config, list(losses))
    for item in dataset.targets:
        if losses[item.name] == CROSS_ENTROPY and not _names_classes(item):
            raise UsageError(
                f"--loss {CROSS_ENTROPY} compares with classes, but the target {item.name} holds {item.dtype} numbers; "
                "give another one, such as --loss mse, or shard with --target-kind class"
            )


def _names_classes(item: Field) -> bool:
    """Whether a target holds a class, or classes of elements: a mask."""
    return item.kind == "class" or (item.kind == "numbers" and not item.dtype.startswith("float") and bool(item.shape))


def shapes_of(fields: Sequence[Field]) -> Mapping[str, tuple[int, ...]]:
    """Shape of a sample by field."""
    return {item.name: tuple(item.shape) for item in fields}
