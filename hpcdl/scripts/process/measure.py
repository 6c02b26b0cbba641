"""What is known of a script's run under `hpcdl run`: its steps, their times, and the run's record.

Also enables faster kernels for Keras's layers, if the script or its `hpcdl run` asks for them.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
import warnings
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdl.checkpoint.background import BackgroundWork
from hpcdl.config.load import as_toml_values
from hpcdl.config.schema import ScriptConfig
from hpcdl.core.protocols import Communicator
from hpcdl.core.records.run_record import ALL_STEPS_UP_TO, HistoryPoint, RankRecord, RunRecord, write_record
from hpcdl.core.statistics import Sample, mean_of_known
from hpcdl.core.units import SAMPLES
from hpcdl.core.units import counted as number_of
from hpcdl.rank import results
from hpcdl.supervision import runtime

if TYPE_CHECKING:
    from hpcdl.comm.observed import Observed
    from hpcdl.node.accelerators import GpuUse


KERNELS_VARIABLE = "HPCDL_FAST_KERNELS"
"""Set in the ranks of `hpcdl run --fast-kernels auto` or `on`."""


def fast_kernels(*, on: bool = True) -> tuple[str, ...]:
    """Make Keras's layers use faster kernels in all models of this process. Return the names of these kernels.

    Each kernel is first compared with Keras's own: outputs, gradients and statistics may differ by 1e-5 of the largest.
    A kernel that differs more is not used, with a warning. Call it before `fit`, or before a step is traced: existing
    graphs do not change. Models, their weights and saved files stay Keras's. With `on=False`, or with a GPU, Keras
    computes everything itself.
    """
    return _used("auto" if on else "off")


def use_kernels_of_launch() -> None:
    """Apply `hpcdl run --fast-kernels` once, before the first step is traced."""
    choice = os.environ.pop(KERNELS_VARIABLE, "")
    if choice:
        _used(choice)


def kernels_used() -> tuple[str, ...]:
    """Return the names of the kernels that computed. Nothing is imported for a script that has asked for none."""
    table = sys.modules.get("hpcdl.step.kernels.table")
    names: tuple[str, ...] = table.names_used() if table else ()
    return names


def _used(choice: str) -> tuple[str, ...]:
    from hpcdl.step.kernels.table import use_chosen_kernels

    # A separate thread is outside the graph being traced, so a tape works there. Inside tf.init_scope no tape records,
    # so no gradient would be compared.
    with ThreadPoolExecutor(1) as beside:
        kernels = beside.submit(use_chosen_kernels, None, choice).result()
    for text in kernels.warnings:
        warnings.warn(text, stacklevel=3)
    return kernels.names


class StepMeter:
    """Counts a script's steps, their seconds and their samples, with the first steps separate."""

    def __init__(self, warmup_steps: int) -> None:
        self._warmup_steps = warmup_steps
        self.num_steps = 0
        self.num_counted = 0
        """Number of steps whose samples are known."""
        self.samples = 0.0
        """Samples of this rank in those steps."""
        self.first_steps = array("d")
        self._cold, self._warm = Sample(ALL_STEPS_UP_TO), Sample(ALL_STEPS_UP_TO)

    @property
    def is_warm(self) -> bool:
        """Whether there were steps after the warm-up."""
        return self._warm.count > 0

    @property
    def steps(self) -> Sample:
        """Seconds of the steps after the warm-up, or of all steps if there are no others."""
        return self._warm if self.is_warm else self._cold

    def add(self, seconds: float, num_steps: int = 1) -> None:
        """Count `num_steps` steps that took `seconds` in total."""
        for _ in range(num_steps):
            if self.num_steps < ALL_STEPS_UP_TO:
                self.first_steps.append(seconds / num_steps)
            (self._cold if self.num_steps < self._warmup_steps else self._warm).add(seconds / num_steps)
            self.num_steps += 1

    def count(self, samples: float, num_steps: int) -> None:
        """Record that the last `num_steps` steps had `samples` samples on this rank."""
        self.samples += samples
        self.num_counted += num_steps


@dataclass(kw_only=True)
class ScriptRun:
    """The run that a script is part of. State and the callback fill it in."""

    run_dir: Path
    config: ScriptConfig
    script: str
    meter: StepMeter
    strategies: list[str] = field(default_factory=list)
    """Names of the strategies that its optimizers and tapes use."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of these strategies that `hpcdl train` also has, under its names."""
    history: list[HistoryPoint] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    checkpoint_interval: Mapping[str, float] = field(default_factory=dict)
    work: BackgroundWork
    unfinished: list[Callable[[], None]] = field(default_factory=list)
    """Functions that wait for background work of the script."""
    began_s: float = field(default_factory=time.monotonic)
    started: RunRecord | None = None

    def begin(self, communicator: Communicator) -> None:
        """Write the initial record before the script's first line. Collective."""
        hosts = communicator.allgather_json(communicator.host)
        software = runtime.software_versions(communicator.library)
        self.started = RunRecord(
            **results.facts_of_place(hosts, software, os.environ.get("HPCDL_PROFILE", "")),
            strategy="script",
            model=Path(self.script).stem,
            data="",
            counted=SAMPLES,
            workers=len(hosts),
            batch_per_rank=None,
            global_batch=None,
            intra_op_threads=int(os.environ.get(runtime.INTRA_OP_VARIABLE, 0)) or None,
            inter_op_threads=int(os.environ.get(runtime.INTER_OP_VARIABLE, 0)) or None,
            warmup_steps=self.config.run.warmup_steps,
            config={**as_toml_values(self.config), "script": self.script},
        )
        if communicator.rank == 0:
            write_record(self.run_dir, self.started)

    def finish_work(self) -> None:
        """Wait for background work after the script's last line. Collective if that work is."""
        while self.unfinished:
            self.unfinished.pop(0)()

    def finish(self, communicator: Observed, gpu: GpuUse) -> None:
        """Write the final record after the script's last line. Collective."""
        assert self.started is not None
        self.started = results.with_devices(self.started, communicator)
        meter = self.meter
        traffic = communicator.monitor.traffic()
        rank_record = RankRecord(
            rank=communicator.rank,
            host=communicator.host,
            **traffic.per_step(meter.num_steps, countable=meter.num_steps > 0),
            peak_memory_bytes=results.peak_memory_bytes(),
            background=vars(self.work.spent),
            clock_set_s=results.clock_set_s(),
            processors=results.processors(),
            gpu_utilisation=gpu.mean if runtime.device_computed_on() else None,
            details={"samples": meter.samples, "steps": meter.num_steps, "counted_steps": meter.num_counted},
        )
        ranks = results.gather_ranks(communicator, rank_record)
        self.strategies = list(itertools.chain(*communicator.allgather_json(self.strategies)))
        if communicator.rank == 0:
            write_record(self.run_dir, self._finished(self.started, ranks))

    def _finished(self, started: RunRecord, ranks: list[RankRecord]) -> RunRecord:
        meter = self.meter
        mean_s = meter.steps.mean if meter.num_steps else None
        counted = [rank.details["samples"] / rank.details["counted_steps"] for rank in ranks if rank.details["samples"]]
        # Ranks that do not count their samples leave those of a step unknown.
        batch = statistics.fmean(counted) if len(counted) == len(ranks) else None
        rate = batch * len(ranks) / mean_s if batch and mean_s else None
        few = f"only {number_of(meter.num_steps, 'step')}: throughput includes the warm-up"
        last = self.history[-1] if self.history else HistoryPoint(epoch=0, step=0, seconds=0)
        return replace(
            started,
            status="finished",
            finished_at=results.now_text(),
            strategy="+".join(dict.fromkeys(self.strategies)) or started.strategy,
            config={**started.config, **self.settings},
            batch_per_rank=None if batch is None else max(1, round(batch)),
            global_batch=None if batch is None else max(1, round(batch * len(ranks))),
            steps=meter.num_steps,
            **results.facts_of_steps(meter.num_steps, meter.first_steps.tolist(), meter.steps),
            images_per_second=rate,
            seconds_total=time.monotonic() - self.began_s,
            resumed_from_steps=self.resumed_from,
            checkpoint_interval=self.checkpoint_interval,
            background=results.summed([rank.background for rank in ranks]),
            bytes_sent_per_step=mean_of_known([rank.bytes_sent_per_step for rank in ranks]),
            bytes_received_per_step=mean_of_known([rank.bytes_received_per_step for rank in ranks]),
            loss=last.loss if last.val_loss is None else last.val_loss,
            accuracy=last.accuracy if last.val_accuracy is None else last.val_accuracy,
            history=self.history,
            rank_records=ranks,
            fast_kernels=kernels_used(),
            warnings=[
                *started.warnings,
                *self.warnings,
                *results.warnings_of_nodes(started, ranks),
                *([few] if rate and not meter.is_warm else []),
            ],
        )
