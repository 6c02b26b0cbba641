"""Doubts about the weights that a run starts from: those of a run that read other classes, or other numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from hpcdl.config.schema import TrainConfig
from hpcdl.core.errors import HpcdlError, shown
from hpcdl.core.paths import quoted
from hpcdl.data.format.dataset import Dataset
from hpcdl.run import rundir
from hpcdl.run.trained_data import data_trained_on
from hpcdl.step.preprocess import fed

_FORM = re.compile(r"\) (as [^,;]+)")
"""What `fed` says of each input behind its shape."""


def doubts(weights: Path, config: TrainConfig, dataset: Dataset) -> list[str]:
    """Return a line for each way in which the run that left the model `weights` has read its data otherwise.

    Nothing is known of a model that lies in no run.
    """
    try:
        other = rundir.read(weights.parent)[0].config
        trained = data_trained_on(weights.parent, other)
    except HpcdlError:
        return []
    if trained is None:
        return []
    lines = []
    names, learnt = dataset.class_names, trained.class_names
    moved = next((name for number, name in enumerate(names) if name in learnt and learnt.index(name) != number), None)
    if moved is not None and (config.model.classes or len(names)) == (other.model.classes or len(learnt)):
        lines.append(
            f"--init-weights: {quoted(weights.parent)} numbers the class {shown(moved)} {learnt.index(moved)}, and "
            f"{dataset.name} {names.index(moved)}: the last layer begins with the outputs of other classes; shard the "
            "data with the same classes in the same order, or expect it to be learnt anew"
        )
    if not (config.data.preprocess or other.data.preprocess):
        now, then = (_FORM.findall(fed(one)) for one in (dataset, replace(trained, scale=other.data.scale)))
        if len(now) == len(then) and now != then:
            differing = next((one, before) for one, before in zip(now, then, strict=True) if one != before)
            lines.append(
                f"--init-weights: {quoted(weights.parent)} was trained on inputs {differing[1]}, and this run reads "
                f"them {differing[0]}; give the same --scale, and shard with the same --normalise"
            )
    return lines
