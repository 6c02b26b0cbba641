"""Refuses invalid combinations: a strategy's declared features against the settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcdl.config.forms import BY_BLOCK, FULL, OFF, PLAIN, WITH_REST, parse_compression, parse_trace
from hpcdl.config.load import all_settings
from hpcdl.config.schema import (
    ElasticConfig,
    ExchangeConfig,
    ModelConfig,
    OptimizerConfig,
    StepBenchConfig,
    TrainConfig,
)
from hpcdl.config.settings import AUTO
from hpcdl.core.errors import ConfigError, UsageError
from hpcdl.strategies.base.strategy import Features, StrategyInfo
from hpcdl.strategies.elastic.replica import moving_rate
from hpcdl.strategies.periodic.methods import METHODS as PERIODIC


def check_exchange(info: StrategyInfo, exchange: ExchangeConfig, *, num_workers: int) -> None:
    """Raise UsageError for an exchange setting that the strategy lacks, or that leaves no worker to wait for."""
    features = info.features
    if exchange.placement is not None and exchange.placement not in features.placements:
        remedy = f"use one of {', '.join(features.placements)}" if features.placements else "leave it out"
        raise UsageError(f"--placement {exchange.placement}: strategy {info.name!r} does not have it; {remedy}")
    if features.compression and (problem := unfit_form(info, exchange.compress)):
        raise UsageError(f"--compress {exchange.compress}: strategy {info.name!r} {problem}")
    refused = {
        f"--compress {exchange.compress}": exchange.compress != "none" and not features.compression,
        f"--accumulate {exchange.accumulate}": exchange.accumulate > 1 and not features.accumulation,
        f"--bucket-size {AUTO}": exchange.bucket_size == AUTO and not features.measured_buckets,
        f"--backup-workers {exchange.backup_workers}": exchange.backup_workers and not features.backup_workers,
    }
    _refuse(info, [setting for setting, wrong in refused.items() if wrong])
    if exchange.backup_workers >= num_workers:
        raise UsageError(
            f"--backup-workers {exchange.backup_workers}: with {num_workers} workers at most {num_workers - 1} "
            "can be left behind; use fewer, or more --ranks"
        )


def unfit_form(info: StrategyInfo, compress: str) -> str:
    """Return why a compressing strategy does not support this form, and an alternative; empty if it does."""
    features, kind = info.features, parse_compression(compress).kind
    with_rest = WITH_REST if features.error_feedback else ()
    by_block: tuple[str, ...] = BY_BLOCK if features.compression_by_block else ()
    if kind in (*PLAIN, *with_rest, *by_block):
        return ""
    if features.error_feedback:
        return f"sends gradients, and {kind} is for changes of weights; use int8, or powersgd:4 for fewer bytes"
    *first, last = *PLAIN[1:], *by_block
    return f"sends changes of weights, as {', '.join(first)} or {last}; use one of these, or an all-reduce such as ring"


def check_compression(info: StrategyInfo, compress: str, precision: str) -> None:
    """Raise UsageError if the rest of compression would be scaled differently from the next step's gradients."""
    if info.features.error_feedback and precision == "mixed_float16" and parse_compression(compress).keeps_rest:
        raise UsageError(
            f"--compress {compress}: --precision mixed_float16 scales the loss by a factor that changes, which what is "
            "left over would not follow; use mixed_bfloat16, or --compress fp16"
        )


def check_optimizer(info: StrategyInfo, optimizer: OptimizerConfig, precision: str) -> None:
    """Raise UsageError for an optimizer setting that the strategy's own engine does not support."""
    _refuse(info, list(_unknown_to_engine(info.features, optimizer, precision)))


def check_unused(info: StrategyInfo | None, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
    """Raise ConfigError for flags that the other settings in `values` do not use. `info` is None for a script.

    A file, or a study's `--set`, may serve several of them; a flag on the command line means this one.
    """
    problems = [f"--{key}: {why}" for key, why in unused_settings(info, values).items() if origins.get(key) == "flag"]
    if problems:
        raise ConfigError(problems)


def unused_settings(info: StrategyInfo | None, values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings that the others in `values` (by key, defaults may be left out) do not use, with the reasons."""
    chosen = {choice: values.get(choice, _DEFAULTS[choice]) for choice, _ in _USERS.values()}
    unused = {
        key: f"--{choice} {chosen[choice]} does not use it; leave it out, or choose one that does: {', '.join(users)}"
        for key, (choice, users) in _USERS.items()
        # Of methods with equations of their own, `_rule_problems` knows what these use.
        if chosen[choice] not in users and not (choice == "optimizer" and info and info.features.optimizers)
    }
    if not values.get("local-checkpoint-every"):
        unused["local-checkpoint-folder"] = (
            "it is for copies in the nodes' memory; leave it out, or add --local-checkpoint-every N"
        )
    return unused


_USERS = {
    "momentum": ("optimizer", ("momentum", "nesterov", "lars")),
    "lars-trust": ("optimizer", ("lars",)),
    "decay-epochs": ("schedule", ("step",)),
    "decay-factor": ("schedule", ("step",)),
    "decay-power": ("schedule", ("polynomial",)),
    "mtbf": ("checkpoint-every", (AUTO,)),
}
"""Settings that go with some values of another one: that other one, and the values."""
_DEFAULTS = {item.key: item.default for item in all_settings(TrainConfig)}


def check_steps_per_call(info: StrategyInfo, asked: int | str) -> None:
    """Raise UsageError for several steps per call if the strategy needs Python between steps."""
    if asked not in (AUTO, 1) and not info.features.several_steps:
        _refuse(info, [f"--steps-per-call {asked}"])


def check_model(info: StrategyInfo, model: ModelConfig, trace: str = OFF) -> None:
    """Raise UsageError for what excludes --xla: an engine of TensorFlow 1, a trace inside a step, other kernels."""
    if not model.xla:
        return
    if not info.features.keras_optimizer:
        _refuse(info, ["--xla"])
    if parse_trace(trace).level == FULL:
        raise UsageError("--xla: forward and backward pass are one operation, into which `--trace full` cannot look")
    if model.fast_kernels == "on":
        raise UsageError("--xla: XLA makes its own kernels; leave --fast-kernels on out, or --xla")


_SERVERS_OF = {"nccl": "grpc-ring"}
"""A site that forbids one forbids both: they start the same servers."""


def check_allowed(info: StrategyInfo, forbidden: tuple[str, ...], where: str) -> None:
    """Raise UsageError if the site forbids the strategy, or the one whose servers it starts."""
    if {info.name, _SERVERS_OF.get(info.name, info.name)} & {*forbidden}:
        raise UsageError(
            f"--strategy {info.name}: this site forbids it (forbid-strategies in {where}); "
            "use one that runs over MPI, such as ring or ps"
        )


def check_elastic(
    info: StrategyInfo,
    config: TrainConfig | StepBenchConfig,
    origins: Mapping[str, str],
    *,
    num_workers: int,
    peak_rate: float,
) -> None:
    """Raise ConfigError with all problems at once. `peak_rate` is the largest learning rate of the run."""
    # Site or user defaults apply to all runs and so do not count as given.
    given_keys = {key for key, origin in origins.items() if not origin.startswith(("default", "site", "user"))}
    problems = [*_unused(info, config, given_keys, origins)]
    if info.features.optimizers:
        problems += [*_rule_problems(info, config, given_keys, origins)]
    if info.features.periodic:
        problems += [
            *_node_problems(config.elastic),
            *_period_problems(info, config.elastic),
        ]
    if info.features.elastic:
        problems += [*_rate_problems(info, config, num_workers, peak_rate)]
    if (info.features.elastic or info.features.optimizers) and config.run.ranks == 1:
        problems.append(f"--ranks 1: strategy {info.name!r} averages over workers; use --ranks 2 or more, or single")
    if problems:
        raise ConfigError(problems)


_PERIODIC = {
    "outer-rate": "slowmo, diloco or streaming-diloco",
    "outer-momentum": "slowmo, diloco or streaming-diloco",
    "post-local-start": "local-sgd",
    **dict.fromkeys(("period-within", "period-between"), "local-sgd, slowmo or diloco"),
    **dict.fromkeys(("fragments", "overlap", "mixing"), "streaming-diloco"),
}
"""Settings of periodic averaging alone, and the strategies that have them."""


def _unknown_to_engine(features: Features, optimizer: OptimizerConfig, precision: str) -> Iterator[str]:
    if optimizer.optimizer == "lars" and not features.lars:
        yield "--optimizer lars"
    if features.keras_optimizer:
        return
    if optimizer.weight_decay:
        yield f"--weight-decay {optimizer.weight_decay:g}"
    if precision == "mixed_float16":
        yield f"--precision {precision}"


def _refuse(info: StrategyInfo, settings: list[str]) -> None:
    if settings:
        raise UsageError(
            f"{', '.join(settings)}: strategy {info.name!r} does not have it; leave it out, "
            "or choose another --strategy (`hpcdl strategies` lists what each has)"
        )


def _unused(
    info: StrategyInfo, config: TrainConfig | StepBenchConfig, given: set[str], origins: Mapping[str, str]
) -> Iterator[str]:
    """Yield settings of the family that the strategy does not use."""
    name = info.name
    if not info.features.servers and origins["servers"] in ("flag", "--set"):  # a file may serve several strategies
        yield f"--servers: strategy {name!r} has no servers; leave it out, or use one that has, such as ps"
    if config.elastic.period == AUTO and not info.features.periodic:
        yield f"--period {AUTO}: strategy {name!r} does not have it; give the steps, or use local-sgd, slowmo or diloco"
    if not info.features.elastic:
        for key in ("elasticity", "moving-rate", "period"):
            if key in given and key not in info.features.periodic:
                yield f"--{key}: strategy {name!r} has no elastic exchange; leave it out, or use an *easgd strategy"
    for key, who in _PERIODIC.items():
        if key in given and key not in info.features.periodic:
            yield f"--{key}: strategy {name!r} does not have it; leave it out, or use {who}"
    if not info.features.optimizers and "unpacked" in given:
        yield f"--unpacked: strategy {name!r} sends buckets; see --bucket-size"
    if info.features.lock_free and config.elastic.unpacked:
        yield f"--unpacked: strategy {name!r} changes its center in place; leave it out"
    if name != "sync-easgd" and "variant" in given:
        yield f"--variant: only sync-easgd has variants, not {name!r}; leave it out"


def _node_problems(elastic: ElasticConfig) -> Iterator[str]:
    """Yield problems of two periods: neither is a multiple of the other, or one is given alone."""
    within, between, period = elastic.period_within, elastic.period_between, elastic.period_steps
    if not period:
        if between is not None:
            yield f"--period {AUTO} and --period-between {between} are the same setting; leave one of them out"
        return
    if between is not None and between != period:
        yield f"--period {period} and --period-between {between} are the same setting; leave --period out"
    elif between is not None and within is None:
        yield f"--period-between {between}: goes with --period-within; use --period {between} without it"
    elif within is not None and (within >= period or period % within):
        divisors = [str(steps) for steps in range(1, period) if period % steps == 0]
        remedy = f"use one of {', '.join(divisors)}, or" if divisors else "use"
        yield (
            f"--period-within {within}: all workers exchange every {period} steps, which must be a larger multiple; "
            f"{remedy} another --period-between"
        )


def _period_problems(info: StrategyInfo, elastic: ElasticConfig) -> Iterator[str]:
    """Yield problems of fragments that do not fit into a period with their overlaps."""
    streaming = PERIODIC[info.name].streaming if info.name in PERIODIC else None
    if streaming is None:
        return
    period = elastic.period_steps
    if not period:
        yield f"--period {AUTO}: strategy {info.name!r} exchanges beside its steps; give the steps, or use diloco"
        return
    fragments = elastic.fragments or min(streaming.fragments, period)
    if fragments > period:
        yield (
            f"--fragments {fragments}: a period of {period} steps has room for as many; "
            f"use --fragments {period} or fewer, or a longer --period"
        )
        return
    if elastic.overlap is not None and elastic.overlap > period // fragments:
        most_overlap = period // fragments
        yield (
            f"--overlap {elastic.overlap}: with --period {period} and {fragments} fragments the next one leaves "
            f"{most_overlap} steps later; use --overlap {most_overlap} or less, or a longer --period"
        )


def _rule_problems(
    info: StrategyInfo, config: TrainConfig | StepBenchConfig, given: set[str], origins: Mapping[str, str]
) -> Iterator[str]:
    """Yield optimizer settings that conflict with the method's own equations."""
    (rule,) = info.features.optimizers
    chosen = config.optimizer.optimizer
    equations = f"strategy {info.name!r} moves weights by its own equations ({rule})"
    if "optimizer" in given and chosen != rule:
        yield f"--optimizer {chosen}: {equations}; use --optimizer {rule}, or leave it out"
    # A file may serve several methods, some of which use it; a flag on the command line means this method.
    if rule == "sgd" and origins["momentum"] in ("flag", "--set"):
        yield f"--momentum: {equations}, without momentum; leave it out, or use {_with_momentum(info.name)}"
    if config.optimizer.weight_decay:
        yield f"--weight-decay {config.optimizer.weight_decay:g}: {equations}, without weight decay; leave it out"
    if config.model.precision == "mixed_float16":
        yield f"--precision mixed_float16: {equations}, without loss scaling; use mixed_bfloat16"
    if config.exchange.compress != "none" and config.elastic.variant == "1":
        yield (
            f"--compress {config.exchange.compress}: --variant 1 has its center on one rank and sends it whole; "
            "leave it out, or use --variant 3"
        )


def _with_momentum(name: str) -> str:
    return "async-measgd" if name.endswith("easgd") else "async-msgd"


def _rate_problems(
    info: StrategyInfo, config: TrainConfig | StepBenchConfig, num_workers: int, peak_rate: float
) -> Iterator[str]:
    """Yield violations of the stability limits that hold for any curvature (docs/explanation/easgd.md)."""
    elastic = config.elastic
    if elastic.elasticity is not None and elastic.moving_rate is not None:
        yield "--elasticity and --moving-rate exclude each other: alpha is learning rate x elasticity, or constant"
        return
    alpha = moving_rate(elastic, num_workers)(peak_rate)
    source = "--moving-rate"
    if elastic.elasticity is not None:
        source = f"--elasticity {elastic.elasticity:g} x learning rate {peak_rate:g} ="
    if problem := unstable_rate(info, alpha, num_workers):
        yield f"{source} {alpha:g}: {problem}"


def unstable_rate(info: StrategyInfo, alpha: float, num_workers: int) -> str:
    """Return what is wrong with a moving rate; empty if it is stable."""
    at_once = info.name == "sync-easgd"
    allowed: Callable[[float], bool] = (lambda a: a < 2 / (num_workers + 1)) if at_once else (lambda a: a <= 1)
    if allowed(alpha):
        return ""
    limit = f"2 / (workers + 1) = {2 / (num_workers + 1):g}" if at_once else "1"
    relation = "below" if at_once else "at most"
    return (
        f"with {num_workers} workers {info.name} is unstable whatever the learning rate; "
        f"alpha must be {relation} {limit}"
    )
