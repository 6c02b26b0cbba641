"""Runs as evidence: what each observed, the placement of ranks, what was fixed, and what is missing."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcdl.config.forms import NONE
from hpcdl.config.schema import BUCKET_BYTES
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import CorruptError, UsageError, shown
from hpcdl.core.paths import typed
from hpcdl.core.records.run_record import is_measured
from hpcdl.core.statistics import drift, outliers
from hpcdl.core.units import counted, listed
from hpcdl.models.load import SAVED, OwnModel, facts_of, is_own
from hpcdl.models.table import EMULATED, FLOP_PER_CORE_AND_SECOND, FLOP_PER_MAC, MODELS
from hpcdl.node.machines import read_machine
from hpcdl.predict.calibration import USUAL_NOISE, MeasuredStep
from hpcdl.predict.jobs import (
    ITEM_BYTES,
    RankLayout,
    StepJob,
    has_period,
    has_servers,
    is_coded,
    kind_of,
    layers_known,
    lengths_of,
    parts_of,
    streaming_of,
)
from hpcdl.predict.messages import coded_bytes_of
from hpcdl.predict.network import Network
from hpcdl.report.analysis.settings import COSTLY, value_of
from hpcdl.report.runs.findings import TracedRun
from hpcdl.report.runs.run import SLOW, Run, contradictions, positive, rates_in_order, slow_worker, unsteady
from hpcdl.run.rundir import MODEL_FILE
from hpcdl.run.trained_data import made_up_data
from hpcdl.strategies.table import ALIASES, STRATEGIES
from hpcdl.supervision import runtime

_GUESS_SPREAD = 0.7
_FUNCTION = "FILE.py:FUNCTION"
NO_RUN_DIRS: Mapping[str, Path] = {}
_ENOUGH_TO_JUDGE = 5
"""Number of repeats that is enough to identify an outlier."""
_STARVED = 0.3
"""Share of a step spent waiting for input above which the file system limits the throughput."""


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Epochs that a run with this global batch needed to reach the target accuracy."""

    global_batch: int
    epochs: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Evidence about one network's training. `stated` are priors of unknowns: value, spread of its logarithm.

    `mode` is weak or strong; `batch` is the samples per worker, or in strong mode of all workers.
    """

    model: str
    monitors: tuple[MeasuredStep, ...]
    stated: Mapping[str, tuple[float, float]]
    layouts: Mapping[str, RankLayout]
    mode: str = "weak"
    batch: int
    threads: int = 0
    gradient_bytes: int | None = None
    recorded: tuple[int, ...] = ()
    """Elements of each variable's gradient as a run's record has them; empty if none does."""
    num_samples: float | None = None
    cores_per_node: int | None = None
    learning: tuple[Learning, ...] = ()
    remarks: tuple[str, ...] = ()
    templates: Mapping[str, StepJob] = field(default_factory=dict)
    """The largest measured job of each strategy, by label (jobs.py). Predicted jobs have its settings."""
    coded_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes of each form of gradients that needs computing and was run (messages.py)."""
    data: str = ""
    """The training data in the form that `--data` takes; empty if no record names them."""
    trained: str = ""
    """The network that `--model` names, if the runs do not show their layers."""
    ready: tuple[tuple[float, float], ...] = ()
    """When gradients are ready, if a trace shows it (StepJob)."""

    @property
    def layers_known(self) -> bool:
        """Whether the network's layers are known, not only the sum of their bytes."""
        return bool(self.recorded) or layers_known(self.model)

    @property
    def spec(self) -> str:
        """The network as `hpcdl train --model` takes it; a placeholder if no function that builds it is known."""
        names = (name for name in (self.trained, self.model) if not name.endswith(SAVED))
        return next((name for name in names if name in MODELS or name.startswith(EMULATED) or is_own(name)), _FUNCTION)

    @property
    def largest_nodes(self) -> int:
        """The most nodes that were measured; 1 without measurements."""
        return max((measurement.job.nodes for measurement in self.monitors), default=1)

    @property
    def largest_workers(self) -> int:
        """The most workers that were measured; 1 without measurements."""
        return max(self.sizes, default=1)

    @property
    def sizes(self) -> list[int]:
        """The measured numbers of workers."""
        return sorted({measurement.job.workers for measurement in self.monitors})

    @property
    def strategies(self) -> list[str]:
        """The measured strategies, by label."""
        return sorted({measurement.job.label for measurement in self.monitors})

    def layout(self, label: str) -> RankLayout:
        """Return the layout of the strategy's own runs, else that of others."""
        fallback = max(self.layouts.values(), key=lambda item: item.workers_per_node, default=RankLayout())
        return self.layouts.get(label, RankLayout(workers_per_node=fallback.workers_per_node))

    def job(self, label: str, nodes: int, servers: int, batch: int | None = None) -> StepJob | None:
        """Return the job on `nodes` nodes; None without room for workers, or if `single` had more than one worker."""
        layout, strategy = self.layout(label), parts_of(label)[0]
        count = servers if has_servers(strategy) else 0
        workers = 1 if strategy == "single" else layout.workers(nodes, count)
        if nodes == 1 and count and workers < 1:
            workers = layout.workers_per_node  # a worker and its server fit on one node
        if workers < 1 or (strategy == "single" and nodes > 1):
            return None
        return self.at(label, nodes, workers, count, batch)

    def at(self, label: str, nodes: int, workers: int, servers: int, batch: int | None = None) -> StepJob:
        """Return the job with these numbers, and with its strategy's settings as measured."""
        whole = batch or self.batch
        strategy, form = parts_of(label)
        like = self.templates.get(label) or self.templates.get(strategy)
        settings = {} if like is None else {key: getattr(like, key) for key in _SETTINGS}
        if form:
            settings |= {"compress": form, "coded_bytes": self.coded_bytes.get(form, 0.0)}
        settings.setdefault("period", STRATEGIES[ALIASES.get(strategy, strategy)].features.default_period)
        fragments, overlap = streaming_of(strategy, settings)
        settings = {"fragments": fragments, "overlap": overlap, **settings}
        return StepJob(
            strategy=strategy, model=self.model, nodes=nodes, workers=workers, servers=servers,
            workers_per_node=self.layout(label).workers_per_node, threads=self.threads,
            batch=whole / workers if self.mode == "strong" and batch is None else whole,
            lengths=lengths_of(self.model, self.gradient_bytes, self.recorded), ready=self.ready, **settings,
        )  # fmt: skip


_EXCHANGE = ("compress", "coded_bytes", "bucket_bytes", "placement", "variant")
_SETTINGS = (*_EXCHANGE, "period", "period_within", "fragments", "overlap")


def _modelled(runs: Sequence[Run]) -> tuple[list[Run], tuple[str, ...]]:
    """Return the `runs` whose messages a forecast can count, and a remark on others. Raises UsageError for none."""
    shown = {
        model: coded_bytes_of([run for run in runs if run.model == model])
        for model in {run.model for run in runs if is_coded(_form(run))}
    }

    def is_known(run: Run) -> bool:
        return not is_coded(_form(run)) or _form(run) in shown[run.model]

    kept, unknown_forms = (
        [run for run in runs if is_known(run)],
        sorted({_form(run) for run in runs if not is_known(run)}),
    )
    if not unknown_forms:
        return kept, ()
    if not kept:
        raise UsageError(
            f"all runs have --compress {', '.join(unknown_forms)}, of which no forecast is made: none of several "
            "workers has counted what it sends; give such runs too, or runs with none, fp16 or bf16"
        )
    left_out = counted(len(runs) - len(kept), "run")
    return kept, (
        f"{left_out} with --compress {', '.join(unknown_forms)} left out: no run of several workers shows its cost",
    )


def _form(run: Run) -> str:
    return run.config.get("compress", NONE)


def gather_evidence(
    runs: Sequence[Run],
    network: Network | None,
    accuracy: float | None = None,
    traced: Sequence[TracedRun] = (),
    trained: str | None = None,
    run_dirs: Mapping[str, Path] = NO_RUN_DIRS,
) -> list[Evidence]:
    """Return the evidence of each network among `runs`. `traced` are those with traces, by name.

    `trained`, as `--model` takes it, is the network of runs that do not show its layers. If it is None, the model file
    of a run shows them, if one of `run_dirs` has it. Raises UsageError with what is missing if the evidence is not
    enough.
    """
    runs, aside = _modelled(runs)
    usable = [run for run in runs if run.usable and run.global_batch > 0]
    if not usable:
        reasons = Counter("of no step" if is_measured(run.status) else run.status for run in runs)
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        raise UsageError(
            f"none of {len(runs)} runs has a throughput ({counts}): train for at least 20 steps after the warm-up"
        )
    _check_machines(usable)
    if wrong := contradictions(usable):
        aside = (*aside, f"records that contradict themselves are used all the same: {listed(wrong, 3)}")
    if crowded := [run.name for run in usable if _is_crowded(run)]:
        aside = (*aside, f"workers shared processors, so predictions may be too slow: {listed(crowded, 3)}")
    models = sorted({run.model for run in usable})
    stated = () if trained is None else _stated_lengths(usable, trained)
    gathered = [
        _of_model([run for run in usable if run.model == model], accuracy, traced, stated, run_dirs) for model in models
    ]
    gathered = [dataclasses.replace(evidence, remarks=(*aside, *evidence.remarks)) for evidence in gathered]
    if trained is not None:
        gathered = [dataclasses.replace(evidence, trained=trained) for evidence in gathered]
    for evidence in gathered:
        _check_enough(evidence, network)
    left_out = len(runs) - len(usable)
    if left_out:
        remark = f"{left_out} of {len(runs)} runs did not finish or have no throughput, and are left out"
        gathered = [dataclasses.replace(evidence, remarks=(*evidence.remarks, remark)) for evidence in gathered]
    return gathered


def _is_crowded(run: Run) -> bool:
    """Return whether a node has more workers than processors, and these compute."""
    return not run.model.startswith(EMULATED) and run.workers > run.nodes * (run.cores_per_node or math.inf)


def _check_machines(runs: Sequence[Run]) -> None:
    for key in ("machine", "processor"):
        names = sorted({getattr(run, key) for run in runs} - {""})
        if len(names) > 1:
            raise UsageError(
                f"the runs are of {len(names)} kinds of nodes by {key} ({', '.join(names[:4])}): a prediction needs"
                " those of one; name these runs alone, and the other kind of node with --machine"
            )


def _check_enough(evidence: Evidence, network: Network | None) -> None:
    if network is not None or len(evidence.sizes) > 1:
        return
    size = evidence.sizes[0]
    strategy = evidence.monitors[0].job.strategy
    other_size = 2 * size if size == 1 else 1
    arguments = ["train", "--model", evidence.spec, "--strategy", "ring" if strategy == "single" else strategy]
    arguments += ["--ranks", str(other_size + (1 if has_servers(strategy) else 0)), "--data"]
    arguments += [evidence.data or made_up_data(evidence.spec) or "DIR"]
    raise UsageError(
        f"all runs of {evidence.model} have {size} worker{'s' if size > 1 else ''}, so nothing shows what an exchange"
        f" costs: run {typed(*arguments)} too, or name the network with --network"
    )


TIMELINE_KNOWS = frozenset(
    (
        "compress",
        "bucket-size",
        "placement",
        "period",
        "period-within",
        "period-between",
        "fragments",
        "overlap",
        "variant",
        "trace",
    )
)
"""Settings that affect time and that a forecast models. Recording a trace costs less than runs differ."""


def _mixed(runs: Sequence[Run]) -> Iterator[str]:
    """Yield what else than the size differs among the runs of a network, and is in no model of a step."""
    for strategy in dict.fromkeys(run.strategy for run in runs):
        members = [run for run in runs if run.strategy == strategy and run.config]
        for key in sorted(COSTLY - TIMELINE_KNOWS):
            if len(values := dict.fromkeys(value_of(run, key) for run in members)) > 1:
                yield (
                    f"runs of {strategy} differ in {key} ({listed(list(values))}), which changes a step: predictions"
                    " mix them; give those of one alone"
                )
    contents = {run.data_content or run.data: run.data for run in runs if run.data}
    if len(contents) > 1:
        yield f"runs on several data sets are taken as one: {listed(list(contents.values()))}"
    if len(versions := sorted({run.version for run in runs} - {""})) > 1:
        yield f"runs of several versions are taken as one: {listed(versions)}"
    if len(libraries := sorted({run.mpi for run in runs} - {""})) > 1:
        yield f"runs over several MPI libraries are taken as one: {listed(libraries)}"
    if texts := [text for run in runs if (text := unsteady(run))]:
        yield f"steps changed their speed during {counted(len(texts), 'run')}; the mean counts: {listed(texts, 3)}"
    if texts := [text for run in runs if (text := slow_worker(run))]:
        yield (
            f"one worker computed {SLOW:g} times as long as the others or longer in {counted(len(texts), 'run')}, as on"
            f" a slow node; it counts as usual: {listed(texts, 3)}"
        )
    machines = {run.machine for run in runs}
    if "" in machines and len(machines) > 1:
        unnamed = sum(not run.machine for run in runs)
        yield f"{unnamed} of {counted(len(runs), 'run')} name no machine, and are taken as of {max(machines)}"


def _stated_lengths(runs: Sequence[Run], trained: str) -> tuple[int, ...]:
    """Return the lengths of `trained`, the network of `runs`. Raises UsageError if runs show their own or others."""
    models = sorted({run.model for run in runs})
    with_gradients = [run.name for run in runs if sum(run.gradient_elements) > 0]
    if with_gradients or layers_known(models[0]):
        raise UsageError(f"--model {trained}: runs say what they trained; leave --model out, or the runs")
    if len(models) > 1:
        raise UsageError(f"--model {trained}: the runs are of {', '.join(models[:4])}; name those of one network")
    lengths = _facts_of(trained).lengths if is_own(trained) else lengths_of(trained, None)
    num_bytes = next((run.gradient_bytes for run in runs if run.gradient_bytes), None)
    if num_bytes is not None and num_bytes != ITEM_BYTES * sum(lengths):
        raise UsageError(
            f"--model {trained} has {ITEM_BYTES * sum(lengths):,} bytes of gradients, the runs of {models[0]} have"
            f" {num_bytes:,}: give the network that they trained, or leave --model out"
        )
    return lengths


def _of_model(
    runs: Sequence[Run],
    accuracy: float | None,
    traced: Sequence[TracedRun],
    stated: tuple[int, ...],
    run_dirs: Mapping[str, Path],
) -> Evidence:
    remarks = list(_mixed(runs))
    recorded = _recorded(runs, remarks) or stated
    if not recorded and not layers_known(runs[0].model):
        recorded = _saved_lengths(runs, run_dirs, remarks)
    if not recorded and not layers_known(runs[0].model):
        remarks.append(
            f"the layers of {runs[0].model} are not known, only their bytes: how they are spread over servers and "
            "buckets is a guess, and intervals are wider for it; --model FILE.keras or FILE.py:FUNCTION gives them"
        )
    ready = _ready(runs, traced, remarks)
    threads = sorted({run.threads for run in runs if run.threads})
    several = len(threads) > 1 and all(run.threads for run in runs)
    gradient_bytes = next((run.gradient_bytes for run in runs if run.gradient_bytes), None)
    coded = coded_bytes_of(runs)
    groups: dict[StepJob, list[Run]] = defaultdict(list)
    for run in runs:
        job = _job_of(run, gradient_bytes, several, remarks, recorded)
        groups[dataclasses.replace(job, ready=ready, coded_bytes=coded.get(job.compress, 0.0))].append(run)
    remarks += _repeats(list(groups.values()))
    monitors = tuple(_observed(job, _without_outliers(members, remarks)) for job, members in groups.items())
    largest = max(monitors, key=lambda seen: (seen.job.nodes, seen.job.workers)).job
    mode, batch = _fixed(runs)
    remarks += [*_not_continued(mode, batch, runs), *_without_parts(runs)]
    samples = [run.seconds_per_epoch * (run.images_per_second or 0) for run in runs if positive(run.seconds_per_epoch)
               and run.seconds_per_epoch]  # fmt: skip
    templates: dict[str, StepJob] = {}
    # The last one stays: the largest job of each strategy.
    for job in sorted(groups, key=lambda job: (job.nodes, job.workers)):
        templates[job.label] = job
    return Evidence(
        model=runs[0].model,
        monitors=monitors,
        stated=_stated(runs, monitors),
        layouts={name: RankLayout(workers_per_node=job.workers_per_node, shared=_is_shared(job))
                 for name, job in templates.items()},
        mode=mode,
        batch=batch,
        threads=largest.threads,
        gradient_bytes=gradient_bytes,
        recorded=recorded,
        num_samples=statistics.median(samples) if samples else None,
        cores_per_node=next((run.cores_per_node for run in runs if run.cores_per_node), None),
        learning=_learning(runs, accuracy) if accuracy is not None else (),
        remarks=tuple(dict.fromkeys(remarks)),
        templates=templates,
        coded_bytes=coded,
        data=Counter(run.config.get("data", "") for run in runs).most_common(1)[0][0],
        ready=ready,
    )  # fmt: skip


def _repeats(groups: Sequence[Sequence[Run]]) -> Iterator[str]:
    """Yield what the repeats of each setting say against the intervals: that they drift, or that there are none."""
    if change := drift([rates_in_order(members) for members in groups]):
        yield (
            f"throughput changes by {100 * change:+.0f} % from the first to the last repeat of a setting: something"
            " drifts, and the intervals assume that nothing does"
        )
    if len(groups) > 1 and all(len(members) == 1 for members in groups):
        yield (
            f"no setting was run twice: that runs differ by {100 * USUAL_NOISE:.1f} % is an assumption, until one is"
            " repeated"
        )


def _saved_lengths(runs: Sequence[Run], run_dirs: Mapping[str, Path], remarks: list[str]) -> tuple[int, ...]:
    """Return the lengths in a model file that a run has left, or has trained; empty if none can be read.

    Code of a model is not run: neither a function that a run names nor code in a file.
    """
    named = [
        (run_dirs[run.name] / MODEL_FILE, Path(run.config.get("model", ""))) for run in runs if run.name in run_dirs
    ]
    path = next(
        (candidate for pair in named for candidate in pair if candidate.suffix in SAVED and candidate.is_file()), None
    )
    if path is None:
        return ()
    try:
        lengths = _facts_of(str(path)).lengths
    except UsageError as error:
        why = str(error).removeprefix(f"--model {path}").lstrip(": ")
        remarks.append(f"{path} does not tell the layers of {runs[0].model}: {why}")
        return ()
    num_bytes = next((run.gradient_bytes for run in runs if run.gradient_bytes), None)
    if num_bytes is not None and num_bytes != ITEM_BYTES * sum(lengths):
        remarks.append(
            f"{path} does not tell the layers of {runs[0].model}: it has {ITEM_BYTES * sum(lengths):,} bytes of"
            f" gradients, the runs have {num_bytes:,}"
        )
        return ()
    remarks.append(f"the layers of {runs[0].model} are those of {path}")
    return lengths


def _ready(
    runs: Sequence[Run], traced: Sequence[TracedRun], remarks: list[str]
) -> tuple[tuple[float, float], ...]:  # fmt: skip
    """Return the readiness from the trace with most buckets, then most steps: each bucket adds a moment."""
    names = {run.name for run in runs}
    with_readiness = [item for item in traced if item.name in names and item.ready]
    if not with_readiness:
        return ()
    best = max(with_readiness, key=lambda item: (len(item.ready), item.steps))
    count = len(best.ready)
    remarks.append(
        f"when gradients are ready comes from the trace of {best.name} ({count} bucket{'s' if count > 1 else ''})"
    )
    return tuple(best.ready)


def _recorded(runs: Sequence[Run], remarks: list[str]) -> tuple[int, ...]:
    """Return each variable's elements as most runs have them. Runs with one network name may have several networks."""
    counted = Counter(tuple(run.gradient_elements) for run in runs if sum(run.gradient_elements) > 0)
    if not counted:
        return ()
    if len(counted) > 1:
        sums = ", ".join(f"{sum(lengths):,}" for lengths in counted)
        remarks.append(
            f"runs of {runs[0].model} have different variables ({sums} elements): those of most runs are taken"
        )
    return counted.most_common(1)[0][0]


def _job_of(
    run: Run, gradient_bytes: int | None, several_threads: bool, remarks: list[str], recorded: tuple[int, ...] = ()
) -> StepJob:
    strategy = ALIASES.get(run.strategy, run.strategy)
    if strategy not in STRATEGIES:
        taken = "ps" if run.servers else "mpi"
        remarks.append(f"{run.strategy} is no strategy of hpcdl: it is taken as {taken}")
        strategy = taken
    servers = run.servers if has_servers(strategy) else 0
    # A record's ranks per node count servers too.
    spread_evenly = run.nodes > 1 and run.workers % run.nodes == 0
    per_node = run.workers // run.nodes if spread_evenly else min(run.workers, run.ranks_per_node)
    if run.nodes == 1:
        per_node = run.workers
    settings = run.config
    fragments, overlap = streaming_of(strategy, settings)
    return StepJob(
        strategy=strategy,
        model=run.model,
        nodes=run.nodes,
        workers=run.workers,
        # An imported table need not count servers.
        servers=max(1, servers) if has_servers(strategy) else 0,
        workers_per_node=max(1, per_node),
        batch=run.global_batch / run.workers,
        # From one number of threads nothing shows what another would change.
        threads=(run.threads or 0) if several_threads else 0,
        lengths=lengths_of(run.model, gradient_bytes, recorded),
        compress=settings.get("compress", NONE),
        bucket_bytes=run.bucket_bytes or _bytes_of(settings.get("bucket-size", AUTO), run),
        placement=settings.get("placement", "") if has_servers(strategy) else "",
        period=_period_of(strategy, run) if has_period(strategy) else 1,
        period_within=int(settings.get("period-within") or 0),
        fragments=fragments,
        overlap=overlap,
        variant=settings.get("variant", "3") if strategy == "sync-easgd" else "3",
    )


def _period_of(strategy: str, run: Run) -> int:
    """Return the steps between exchanges; the strategy's default if the run's choice is unknown."""
    asked = run.config.get("period", 1)
    return run.period or (
        STRATEGIES[ALIASES.get(strategy, strategy)].features.default_period if asked == AUTO else int(asked)
    )


def _bytes_of(size: str, run: Run) -> int:
    """Return the bytes of a bucket from a record; the default if the run's choice is unknown."""
    if size == AUTO:
        return BUCKET_BYTES
    try:
        return int(float(size))
    except (ValueError, TypeError, OverflowError):
        raise CorruptError(f"the record of {run.name} is damaged: bucket-size is {shown(size)}, no size") from None


def _is_shared(job: StepJob) -> bool:
    return job.servers > 0 and job.nodes > 1 and job.workers % job.nodes == 0


def _without_outliers(runs: Sequence[Run], remarks: list[str]) -> list[Run]:
    """Return the repeats of a job without outliers. With few repeats an outlier cannot be identified."""
    rates = [run.images_per_second or 0.0 for run in runs]
    off = outliers(rates)
    middle = f"far off the {statistics.median(rates):,.4g} of its {len(runs)} repeats in the median"
    if len(runs) < _ENOUGH_TO_JUDGE:
        remarks += [
            f"{runs[index].name} counts, though its {rates[index]:,.4g} a second are {middle}; repeat it"
            for index in off
        ]
        return list(runs)
    remarks += [f"{runs[index].name} is left out: its {rates[index]:,.4g} a second are {middle}" for index in off]
    return [run for index, run in enumerate(runs) if index not in off]


def _observed(job: StepJob, runs: Sequence[Run]) -> MeasuredStep:
    seconds = tuple(job.workers * job.batch / (run.images_per_second or 1.0) for run in runs)
    waits = [run.parts["wait"] for run in runs if "wait" in run.parts and job.workers > 1]
    computes = [run.parts["compute"] for run in runs if positive(run.parts.get("compute")) and job.workers == 1]
    # Workers that come to a center in turn wait for it: their timeline has no slowest one.
    slowest = STRATEGIES[job.strategy].features.synchronous and kind_of(job.strategy) != "center"
    return MeasuredStep(
        job=job,
        seconds=seconds,
        wait_s=statistics.fmean(waits) if waits and slowest else None,
        compute_s=statistics.geometric_mean(computes) if computes else None,
    )


def _fixed(runs: Sequence[Run]) -> tuple[str, int]:
    """Return what is fixed, samples per worker or in total, and its value: the one that most runs have."""
    per_worker = Counter(round(run.global_batch / run.workers) for run in runs)
    in_all = Counter(run.global_batch for run in runs)
    if len(in_all) == 1 and len(per_worker) > 1:
        return "strong", in_all.most_common(1)[0][0]
    return "weak", per_worker.most_common(1)[0][0]


def _not_continued(mode: str, batch: int, runs: Sequence[Run]) -> list[str]:
    """Return a remark if runs of strong scaling are beside weak ones, whose sizes are predicted."""
    if mode != "weak" or not any(run.mode == "strong" for run in runs):
        return []
    return [
        f"runs of strong scaling are used, but not continued: sizes are predicted for {batch} samples per worker,"
        " unless --batch-size says otherwise; give the runs of one global batch alone to continue them"
    ]


def _without_parts(runs: Sequence[Run]) -> list[str]:
    """Return a remark if only the lengths of steps are known, as in most tables: several costs may explain them."""
    if any(run.parts for run in runs) or all(run.workers == 1 for run in runs):
        return []
    return ["no run has the parts of a step: what limits a step, and what halving a cost saves, are guesses"]


def _stated(runs: Sequence[Run], monitors: Sequence[MeasuredStep]) -> dict[str, tuple[float, float]]:
    """Return the start of the search for the unknowns, and values that parts of steps show directly."""
    first = min(monitors, key=lambda seen: seen.job.workers)
    step = statistics.geometric_mean(first.seconds)
    threads = max(1, first.job.threads)
    # With the usual batch_overhead of one sample, and thread_power of 0.9 (calibration.py).
    stated = {"image_s": (step / (first.job.batch + 1) * threads**0.9, 3.0)}
    stated["update_s"] = (0.03 * step, 1.0)
    stated["input_s"] = (0.003 * step, 1.0)
    with_parts = [run.parts for run in runs if run.parts]
    if with_parts:
        updates = [max(parts.get("update", 0.0) + parts.get("other", 0.0), 1e-6) for parts in with_parts]
        stated["update_s"] = (statistics.geometric_mean(updates), 0.25)
        waits = [max(parts.get("input", 0.0), 1e-6) for parts in with_parts]
        stated["input_s"] = (statistics.geometric_mean(waits), 0.4)
    starved = [
        run.images_per_second for run in runs
        if run.nodes > 1 and run.parts and run.images_per_second
        and run.parts.get("input", 0.0) > _STARVED * sum(run.parts.values())
    ]  # fmt: skip
    if starved:
        stated["file_system_images_s"] = (max(starved), 0.2)
        # The file system's bound explains this wait, which must not count twice.
        stated["input_s"] = (1e-6, 0.4)
    # The 95 % quantile of a lognormal is 1.645 standard deviations above its middle.
    lonely = [math.log(run.step_seconds_p95 / run.step_seconds) / 1.645 for run in runs
              if run.workers == 1 and run.step_seconds and run.step_seconds_p95
              and run.step_seconds_p95 > run.step_seconds]  # fmt: skip
    if lonely:
        # Part of the variation on one worker may hit all at once; only the rest makes others wait.
        stated["noise"] = (min(0.5, max(0.005, 0.7 * statistics.median(lonely))), 0.6)
    return stated


def _learning(runs: Sequence[Run], accuracy: float) -> tuple[Learning, ...]:
    """Return epochs to the accuracy, interpolated between evaluations. Raises UsageError if no run reaches it."""
    learned, best = [], 0.0
    for run in runs:
        before = (0.0, 0.0)
        for point in run.history:
            reached = point.val_accuracy if point.val_accuracy is not None else point.accuracy
            if reached is None:
                continue
            best = max(best, reached)
            if reached >= accuracy:
                share = (accuracy - before[1]) / max(reached - before[1], 1e-12)
                epochs = before[0] + share * (point.epoch - before[0])
                learned.append(Learning(global_batch=run.global_batch, epochs=epochs))
                break
            before = (point.epoch, reached)
    if not learned:
        raise UsageError(
            f"--target {100 * accuracy:g}%: no run of {runs[0].model} reaches it, the best has {100 * best:.1f} %;"
            " give runs that were trained and evaluated further, or another target"
        )
    return tuple(learned)


def guessed_evidence(model: str, batch: int, machine: str | None) -> Evidence:
    """Return evidence without measurements: computing from MACs and cores, a guess within a factor of two."""
    macs, lengths = _operations_of(model)
    hardware = read_machine(machine or "generic")
    cores = len(hardware.topology.cores)
    per_node = (hardware.settings.ranks_per_node if hardware.settings else None) or 1
    rate = hardware.flop_per_second or cores * FLOP_PER_CORE_AND_SECOND
    spread = hardware.flop_spread if hardware.flop_per_second else _GUESS_SPREAD
    source = (
        f"what was published for {hardware.name}" if hardware.flop_per_second else f"{cores} cores of {hardware.name}"
    )
    seconds = FLOP_PER_MAC * macs * per_node / rate
    return Evidence(
        model=model,
        monitors=(),
        stated={"image_s": (seconds, spread), "update_s": (ITEM_BYTES * sum(lengths) / 5e9, 1.0)},
        layouts={"ring": RankLayout(workers_per_node=per_node)},
        batch=batch,
        gradient_bytes=ITEM_BYTES * sum(lengths),
        recorded=lengths if is_own(model) else (),
        cores_per_node=cores,
        remarks=(
            f"nothing is measured: computing is guessed from {float(f'{macs / 1e6:.3g}'):,g} million MACs and "
            f"{source}, so every number may be off by a factor of two; one run on one node mends most of it",
        ),
    )


def _operations_of(model: str) -> tuple[int, tuple[int, ...]]:
    """Return one sample's multiply-accumulates, forward, and the gradients' lengths. Raises UsageError if unknown."""
    if model in MODELS:
        return MODELS[model].macs, lengths_of(model, None)
    if not is_own(model):
        raise UsageError(
            f"--model {model}: its operations are not known; give FILE.keras, FILE.py:FUNCTION, or one of"
            f" {', '.join(MODELS)}"
        )
    facts = _facts_of(model)
    if not facts.macs:  # 0: it has only operations that are not counted
        run = typed("train", "--model", _FUNCTION if model.endswith(SAVED) else model, "--ranks", 1)
        raise UsageError(
            f"--model {model}: its graph does not tell its operations (a loop, an input of open shape, or none that are"
            f" products), so one node has to be measured: {run} --data DIR, and name that run"
        )
    return facts.macs, facts.lengths


def _facts_of(spec: str) -> OwnModel:
    """Return facts about a user's own network. Importing TensorFlow takes some seconds."""
    # Before the import: TensorFlow reads its log level when it loads.
    runtime.import_tensorflow()
    return facts_of(spec)


def sample_bytes(model: str) -> int | None:
    """Return the bytes of one raw sample in a shard, a byte per value; None for a network outside the table."""
    info = MODELS.get(model)
    return math.prod(info.input_shape) if info else None
