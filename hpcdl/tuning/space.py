"""The candidates of a node: every setting's levels, crossed if they act together; and candidates as points.

The most important settings (ranks, threads, hardware threads, binding, memory) are crossed. Less important ones (engine
details, allocator, XLA, spinning) vary one at a time, at one hardware thread per core, unless a space file names them.
On a node with GPUs the question differs: how many host threads each rank needs beside its GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcdl.core.errors import ConfigError, UsageError, suggestion
from hpcdl.core.protocols import LaunchPlan
from hpcdl.core.storage.files import read_toml
from hpcdl.node.engine import Engine
from hpcdl.node.plan import INTER_OP_DEFAULT, launch_plan
from hpcdl.node.profile import SETTINGS, Settings
from hpcdl.node.topology import Topology

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
CATEGORICAL = ("binding", "memory_policy", "onednn", "allocator", "xla", "onednn_isa", "onednn_fpmath")
"""Known settings whose values have no order."""
PRODUCTS = (
    (("ranks_per_node", 1), ("intra_op_threads", 1)),
    (("ranks_per_node", 1), ("intra_op_threads", 1), ("threads_per_core", -1)),
    (("intra_op_threads", 1), ("inter_op_threads", 1)),
)
"""Products that matter to a node: all threads, cores in use, threads at a time. Exponents by setting."""
START_SHARE = 0.3
START_AT_LEAST = 6


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One coordinate: `levels[i]` of candidate i, and the distances (0 to 1) between levels.

    It is a setting if `main`, else the product of `terms`.
    """

    name: str
    ordered: bool
    main: bool
    terms: tuple[str, ...]
    levels: Indices
    distances: Floats


def factors_of(candidates: Sequence[Mapping[str, Any]]) -> list[Factor]:
    """Return the coordinates in which `candidates` differ, without settings that are the same everywhere."""
    names = list(dict.fromkeys(name for candidate in candidates for name in candidate))
    all_factors = [_factor(name, [candidate.get(name) for candidate in candidates]) for name in names]
    factors = [factor for factor in all_factors if factor is not None]
    varying = {factor.name for factor in factors if factor.ordered}
    for terms in PRODUCTS:
        if all(name in varying for name, _ in terms):
            product = _product(terms, candidates)
            if product is not None:
                factors.append(product)
    return factors


def number_of(value: Any) -> float | None:
    """Return `value` as a number, or None if it is none; booleans are categories."""
    if value is None or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None


def _factor(name: str, values: Sequence[Any]) -> Factor | None:
    levels = sorted(set(values), key=str)
    if len(levels) < 2:
        return None
    numbers = {value: number_of(value) for value in levels}
    if name in CATEGORICAL or None in numbers.values() or len(set(numbers.values())) < 2:
        codes_of = {value: code for code, value in enumerate(levels)}
        codes = np.array([codes_of[value] for value in values])
        apart = 1.0 - np.eye(len(levels))
        return Factor(name=name, ordered=False, main=True, terms=(name,), levels=codes, distances=apart)
    return _ordered((name,), [numbers[value] or 0.0 for value in values], main=True)


def _ordered(terms: tuple[str, ...], numbers: Sequence[float], *, main: bool) -> Factor:
    """Scale half by rank, half by logarithm if all are positive: neither 1-2-4-256 nor 60-64-66-68 is squeezed."""
    levels, codes = np.unique(np.asarray(numbers, dtype=float), return_inverse=True)
    ranks = np.arange(len(levels)) / (len(levels) - 1)
    scaled = np.log(levels) if levels[0] > 0 else levels
    position = 0.5 * (ranks + (scaled - scaled[0]) / (scaled[-1] - scaled[0]))
    distances = np.abs(position[:, None] - position[None, :])
    return Factor(name="*".join(terms), ordered=True, main=main, terms=terms, levels=codes, distances=distances)


def _product(terms: Sequence[tuple[str, int]], candidates: Sequence[Mapping[str, Any]]) -> Factor | None:
    logarithms = np.zeros(len(candidates))
    for name, exponent in terms:
        for index, candidate in enumerate(candidates):
            number = number_of(candidate.get(name, 1))
            if number is None or number <= 0:
                return None
            logarithms[index] += exponent * math.log(number)
    # 2 x 3 and 6 x 1 are one level, despite rounding.
    values = np.exp(np.round(logarithms, 9))
    if len(np.unique(values)) < 2:
        return None
    return _ordered(tuple(name for name, _ in terms), list(values), main=False)


def initial_design(
    factors: Sequence[Factor], num_candidates: int, *, anchors: Sequence[int], budget: int, dice: np.random.Generator
) -> list[int]:
    """Return anchors, then candidates with the least used level of every setting in turn; ties are random."""
    levels = [factor.levels for factor in factors if factor.main]
    most = max((int(level.max()) + 1 for level in levels), default=1)
    wanted = max(START_AT_LEAST, min(int(START_SHARE * budget), 3 * most + 4 * len(levels)))
    counts = [np.zeros(int(level.max()) + 1) for level in levels]
    order = dice.permutation(num_candidates)
    chosen: list[int] = []
    load = np.zeros(num_candidates)
    for turn in range(min(wanted, num_candidates)):
        index = anchors[turn] if turn < len(anchors) else int(order[np.argmin(load[order])])
        chosen.append(index)
        for count, level in zip(counts, levels, strict=True):
            count[level[index]] += len(count)  # every setting has the same weight, whatever its number of levels
        load = sum((count[level] for count, level in zip(counts, levels, strict=True)), np.zeros(num_candidates))
        load[chosen] = np.inf
    return list(dict.fromkeys(chosen))


def beside(factors: Sequence[Factor], index: int, num_candidates: int) -> Indices:
    """Return candidates one level from `index` in one setting, or along a ridge with the same product of settings."""
    mains = [factor for factor in factors if factor.main]
    apart = {factor.name: np.abs(factor.levels - factor.levels[index]) for factor in mains}
    steps = {factor.name: apart[factor.name] if factor.ordered else apart[factor.name] > 0 for factor in mains}
    is_near = sum(steps.values(), np.zeros(num_candidates)) == 1
    for factor in factors:
        if not factor.main:
            other_steps = [step for name, step in steps.items() if name not in factor.terms]
            same = sum(other_steps, np.zeros(num_candidates)) == 0
            is_near |= same & (factor.levels == factor.levels[index])
    is_near[index] = False
    return np.flatnonzero(is_near)


CROSSED = (
    "batch_size", "ranks_per_node", "intra_op_threads", "inter_op_threads", "threads_per_core", "binding",
    "free_cores", "memory_policy",
)  # fmt: skip
MAX_CANDIDATES = 20_000
Levels = Mapping[str, Sequence[Any]]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One possible way to use the node: all counts filled in, and its launch plan on one node."""

    settings: Settings
    plan: LaunchPlan
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class Space:
    """Candidates, those to start with (`anchors`, by index), and the number of dropped ones by reason."""

    candidates: tuple[Candidate, ...]
    anchors: tuple[int, ...]
    dropped: Mapping[str, int]


def read_space(path: Path) -> dict[str, list[Any]]:
    """Return the levels in a space file: `setting = [values]`. One value fixes a setting; `only = true` fixes the rest.

    Raises ConfigError with every problem found.
    """
    levels: dict[str, list[Any]] = {}
    problems = []
    for key, raw in read_toml(path).items():
        name = key.replace("-", "_")
        if name == "only":
            levels["only"] = [bool(raw)]
            continue
        if name not in SETTINGS:
            problems.append(f"{path}: unknown setting {key!r}{suggestion(name, [*SETTINGS, 'only'])}")
            continue
        values = raw if isinstance(raw, list) else [raw]
        if not values:
            problems.append(f"{path}: {key}: an empty list leaves nothing to try; give values or remove the line")
        try:
            levels[name] = [SETTINGS[name].parse(value) for value in values]
        except ValueError as error:
            problems.append(f"{path}: {key}: {error}")
    if problems:
        raise ConfigError(problems)
    return levels


def build_space(
    topology: Topology,
    engine: Engine,
    *,
    narrowing: Levels | None = None,
    published: Mapping[str, Settings] = MappingProxyType({}),
    batch_sizes: Sequence[int] = (),
) -> Space:
    """Return the candidates of `topology` under `engine`; `narrowing` replaces levels.

    `published` are settings to begin with, by their source.

    Candidates that start the same way (same environment, cores and memory) are merged. Raises UsageError without any.
    """
    narrowing = dict(narrowing or {})
    only = bool(narrowing.pop("only", [False])[0])
    named = {name: list(values) for name, values in narrowing.items()}
    num_devices = sum(topology.devices.values())
    if batch_sizes:
        named["batch_size"] = list(batch_sizes)
    dropped: Counter[str] = Counter()
    anchors = [] if only else _anchors(topology, published, batch_sizes)
    candidates_by_key: dict[str, Candidate] = {}
    for settings, origin in itertools.chain(anchors, ((item, "") for item in _points(topology, engine, named, only))):
        # A space file also excludes values that published advice has.
        if origin and any(getattr(settings, name) not in values for name, values in named.items()):
            continue
        ranks = settings.ranks_per_node or 1
        if num_devices and num_devices % ranks:
            dropped[f"{ranks} ranks do not divide the {num_devices} GPUs, of which each rank takes one"] += 1
            continue
        if ranks > len(topology.usable_cores):
            dropped[f"{ranks} ranks cannot have a core each: {len(topology.usable_cores)} cores may be used"] += 1
            continue
        try:
            plan = launch_plan(topology, settings, ranks, ranks, openmp=engine.openmp)
        except UsageError as error:
            dropped[str(error).partition(";")[0]] += 1
            continue
        # Of equal candidates the first stays: anchors come first, with their origin.
        candidates_by_key.setdefault(_key(settings, plan), Candidate(settings=settings, plan=plan, origin=origin))
        if len(candidates_by_key) > MAX_CANDIDATES:
            raise UsageError(f"the space has more than {MAX_CANDIDATES} candidates; narrow it with --space FILE")
    if not candidates_by_key:
        reason, count = dropped.most_common(1)[0] if dropped else ("no setting has a value", 0)
        raise UsageError(f"the space is empty: {reason} ({count} candidates left out); widen --space FILE")
    candidates = tuple(candidates_by_key.values())
    starts = tuple(index for index, candidate in enumerate(candidates) if candidate.origin)
    return Space(candidates=candidates, anchors=starts, dropped=dict(dropped))


def tensorflow_defaults(topology: Topology) -> Settings:
    """Return TensorFlow's own choice: one rank, one thread of each kind per allowed CPU, nothing bound."""
    cpus = len(topology.allowed_cpus)
    return Settings(
        ranks_per_node=1, intra_op_threads=cpus, inter_op_threads=cpus, binding="none",
        threads_per_core=topology.threads_per_core,
    )  # fmt: skip


def intel_guide(topology: Topology) -> Settings:
    """Return the TensorFlow guide's Intel advice: intra-op = physical cores, inter-op = sockets (papers: section 6)."""
    packages = len({core.package for core in topology.usable_cores})
    return Settings(
        ranks_per_node=1, intra_op_threads=len(topology.usable_cores), inter_op_threads=packages, binding="compact"
    )


def _anchors(
    topology: Topology, published: Mapping[str, Settings], batch_sizes: Sequence[int]
) -> list[tuple[Settings, str]]:
    anchors = [
        (tensorflow_defaults(topology), "TensorFlow's defaults"),
        (intel_guide(topology), "Intel's guide: intra = cores, inter = sockets"),
        *((settings, origin) for origin, settings in published.items()),
    ]
    if topology.devices:  # the other advice is for CPUs
        defaults, origin = anchors[0]
        anchors = [(dataclasses.replace(defaults, ranks_per_node=_ranks_with_devices(topology)), origin)]
    sizes = batch_sizes or (None,)
    return [(dataclasses.replace(item, batch_size=size), origin) for size in sizes for item, origin in anchors]


def _points(topology: Topology, engine: Engine, named: Levels, only: bool) -> Iterable[Settings]:
    levels = {} if only else _device_levels(topology) if topology.devices else _default_levels(topology, engine)
    plain = Settings()
    crossed = {name: named.get(name, levels.get(name, [getattr(plain, name)])) for name in CROSSED}
    crossed |= {name: values for name, values in named.items() if name not in crossed}
    turned = {name: values for name, values in levels.items() if name not in crossed}
    if crossed["ranks_per_node"] == [None]:
        crossed["ranks_per_node"] = [_ranks_with_devices(topology)]
    derive = "intra_op_threads" not in {**named, **levels} and not only
    for values in itertools.product(*crossed.values()):
        point = Settings(**dict(zip(crossed, values, strict=True)))
        for threads in _thread_counts(topology, point) if derive else [point.intra_op_threads]:
            counted = dataclasses.replace(
                point, intra_op_threads=threads, inter_op_threads=point.inter_op_threads or INTER_OP_DEFAULT
            )
            if counted.intra_op_threads is None:
                counted = dataclasses.replace(counted, intra_op_threads=max(_thread_counts(topology, point), default=1))
            yield counted
            # Details beside one choice of threads alone, or they would multiply the candidates.
            if counted.inter_op_threads == crossed["inter_op_threads"][-1] and counted.threads_per_core == 1:
                yield from _turned(counted, turned)


def _turned(point: Settings, levels: Levels) -> Iterable[Settings]:
    """Yield `point` with one detail changed at a time."""
    for name, values in levels.items():
        yield from (dataclasses.replace(point, **{name: value}) for value in values if value != getattr(point, name))


def _default_levels(topology: Topology, engine: Engine) -> dict[str, list[Any]]:
    num_cores, num_nodes = len(topology.usable_cores), len(topology.core_nodes)
    ranks = {1, topology.num_packages, num_nodes, 2, 4, 8}
    policies = ["default"]
    if num_nodes > 1:
        policies += ["membind", "interleave"]
    if topology.fast_nodes:
        policies += ["membind-fast", "preferred-fast"]
    bindings = ["balanced", "compact", "scatter", *(["numa"] if num_nodes > 1 else []), "none"]
    levels: dict[str, list[Any]] = {
        "ranks_per_node": sorted(count for count in ranks if count <= num_cores),
        # The last value is the one beside which details are tried (`_points`).
        "inter_op_threads": [1, 4, 2],
        "threads_per_core": [count for count in (1, 2, 4) if count <= topology.threads_per_core],
        "binding": bindings if num_cores > 1 else ["none"],
        "memory_policy": policies,
        "onednn": [None, *(choice for choice in (True, False) if choice is not engine.onednn)],
        "onednn_isa": list(engine.isa_caps),
        "allocator": list(engine.allocators),
        "xla": [False, True],
    }
    if engine.openmp:
        levels["kmp_blocktime"] = [None, 0, 1, 30, 200]
    return levels


def _ranks_with_devices(topology: Topology) -> int:
    """Return a rank per GPU, or if cores are fewer, the most ranks with equal numbers of GPUs; 1 without GPUs."""
    num_devices = sum(topology.devices.values()) or 1
    most = min(num_devices, len(topology.usable_cores))
    return next(ranks for ranks in range(most, 0, -1) if num_devices % ranks == 0)


def _device_levels(topology: Topology) -> dict[str, list[Any]]:
    """Return levels of host threads for a rank with its own GPU: the engine's details on CPUs matter little there."""
    ranks = _ranks_with_devices(topology)
    share = len(topology.usable_cores) // ranks
    return {
        "ranks_per_node": [ranks],
        "intra_op_threads": sorted({share, *(1 << power for power in range(share.bit_length()))}),
        "inter_op_threads": [1, 4, 2],
        "threads_per_core": [count for count in (1, 2, 4) if count <= topology.threads_per_core],
        "binding": ["devices", "none"],
        "memory_policy": ["default", *(["membind"] if len(topology.core_nodes) > 1 else [])],
    }


def _thread_counts(topology: Topology, point: Settings) -> list[int]:
    """Return threads that fill a rank's share of cores, that share less some for the system, and halves of it."""
    share = max(len(topology.usable_cores) - point.free_cores, 1) // (point.ranks_per_node or 1)
    if share < 1:
        return [point.threads_per_core]  # cannot be placed; the later attempt says why
    round_share = 1 << (share.bit_length() - 1)  # 64 of 68
    sizes = {share, round_share, share - 2 if share >= 16 else share, max(share // 2, 1), max(share // 4, 1)}
    return [size * point.threads_per_core for size in sorted(sizes, reverse=True)]


def _key(settings: Settings, plan: LaunchPlan) -> str:
    """Return a key that is equal for candidates that start the same way."""
    shown = (settings.batch_size, plan.num_ranks, sorted(plan.environment.items()))
    return repr((shown, plan.cpus_by_local_rank, plan.memory_nodes_by_local_rank, plan.memory_policy))
