"""Proposals for the next trials, by Optuna: only this file imports it. Trials are in a journal file, never in SQLite.

A journal is appended to under its own lock, which works on shared file systems; databases on them lock up and corrupt.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcdl.config.search import Dimension, SearchStudy
from hpcdl.core.errors import CorruptError, HpcdlError, UsageError
from hpcdl.core.storage.files import open_regular

JOURNAL = "journal.log"
FINISHED, STOPPED, FAILED, RUNNING = "finished", "stopped", "failed", "running"
_STATES = {"COMPLETE": FINISHED, "PRUNED": STOPPED, "FAIL": FAILED, "RUNNING": RUNNING, "WAITING": RUNNING}
_STARTUP = 10
"""Number of random trials before a model of the objective is built."""
_MOST_BYTES = 1 << 28
"""Largest size of a journal, which Optuna reads as a whole: about a hundred thousand trials."""
_SEED_STEP = 1_000_003
"""Distance between the seeds of one search before and after it is resumed."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A trial: its number, its settings, its state, and its values by objective once it has finished."""

    number: int
    settings: Mapping[str, Any]
    state: str
    values: tuple[float, ...] = ()
    notes: Mapping[str, Any]


class Proposals:
    """The trials of one search, in a journal in `folder` that survives a killed process.

    Raises CorruptError if the file is no such journal or is damaged. An incomplete last line is ignored.
    """

    def __init__(self, folder: Path, search: SearchStudy) -> None:
        optuna = _optuna()
        self._search = search
        with _quiet(), _whole(folder / JOURNAL):
            self._study = optuna.create_study(
                study_name=search.name,
                storage=optuna.storages.JournalStorage(
                    optuna.storages.journal.JournalFileBackend(str(folder / JOURNAL))
                ),
                directions=search.directions,
                pruner=_pruner(search),
                load_if_exists=True,
            )
            # By default Optuna copies all trials at each call.
            for trial in self._study.get_trials(deepcopy=False):
                _check(trial)
            # After the check: the sampler's seed depends on how many trials the journal holds.
            self._study.sampler = _sampler(search, len(self._study.get_trials(deepcopy=False)))

    def ask(self) -> Proposal:
        """Return the next trial, already recorded as running."""
        with _quiet():
            trial = self._study.ask()
            values: dict[str, Any] = {}
            for dimension in self._search.space:
                if dimension.applies({**self._search.train, **values}):
                    values[dimension.key] = _suggest(trial, dimension)
            # Settings are kept as plain values: journals hold only numbers, texts and booleans.
            trial.set_user_attr("settings", {key: _plain(value) for key, value in values.items()})
        return Proposal(number=trial.number, settings=values, state=RUNNING, notes={})

    def progress(self, number: int, epoch: int, value: float) -> bool:
        """Record the progress of a trial. Return whether to stop it."""
        optuna = _optuna()
        if len(self._search.plan.objective) > 1 or not math.isfinite(value):
            return False
        with _quiet():
            frozen = self._frozen(number)
            # A trial that starts again reports its first epochs twice; they were judged the first time.
            if epoch in frozen.intermediate_values:
                return False
            # Only `ask` returns a Trial: one of an earlier call has to be made from its number in the journal.
            trial = optuna.trial.Trial(self._study, frozen._trial_id)
            trial.report(value, epoch)
            return bool(self._search.plan.halving and trial.should_prune())

    def tell(self, number: int, state: str, values: Sequence[float] = (), **notes: Any) -> None:
        """Record how a trial ended. A trial that has already ended does not change, so that nothing counts twice."""
        optuna = _optuna()
        names = {state_name: name for name, state_name in _STATES.items() if name != "WAITING"}
        with _quiet():
            frozen = self._frozen(number)
            if frozen.state.is_finished():
                return
            trial = optuna.trial.Trial(self._study, frozen._trial_id)
            for key, value in notes.items():
                trial.set_user_attr(key, value)
            with contextlib.suppress(RuntimeError) if self._search.plan.sampler == "grid" else contextlib.nullcontext():
                # An exhausted grid stops Optuna's own loop, which is not used here.
                self._study.tell(
                    number, list(values) if state == FINISHED else None, state=optuna.trial.TrialState[names[state]]
                )

    def all(self) -> list[Proposal]:
        """Return every trial so far, by number."""
        proposals = []
        for frozen in self._study.get_trials(deepcopy=False):
            notes = dict(frozen.user_attrs)
            settings = notes.pop("settings", {})
            values = tuple(frozen.values or ()) if frozen.state.name == "COMPLETE" else ()
            proposals.append(
                Proposal(number=frozen.number, settings=settings, state=_STATES[frozen.state.name], values=values,
                         notes=notes)
            )  # fmt: skip
        return proposals

    def front(self) -> list[int]:
        """Return the numbers of the best trials: one, or those that no other beats in all objectives."""
        finished = [proposal for proposal in self.all() if proposal.state == FINISHED]
        if not finished:
            return []
        with _quiet():
            if len(self._search.plan.objective) == 1:
                return [self._study.best_trial.number]
            return [trial.number for trial in self._study.best_trials]

    def importance(self) -> dict[str, float]:
        """Return each setting's share of influence on the first objective; empty after too few trials."""
        optuna = _optuna()
        several = len(self._search.plan.objective) > 1
        with _quiet():
            try:
                shares = optuna.importance.get_param_importances(
                    self._study,
                    evaluator=optuna.importance.PedAnovaImportanceEvaluator(),
                    target=(lambda trial: trial.values[0]) if several else None,
                )
            except (ValueError, RuntimeError, IndexError):  # Optuna 4 indexes by values that are equal or NaN
                return {}
        return {key: float(value) for key, value in shares.items() if math.isfinite(value)}

    def _frozen(self, number: int) -> Any:
        return self._study.get_trials(deepcopy=False)[number]


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError("hpcdl search needs the package optuna; pip install 'hpcdl[search]'") from None
    # Optuna logs each trial to stderr, where the display of the search is.
    optuna.logging.set_verbosity(logging.WARNING)
    return optuna


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Optuna's warnings about its newer parts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _check(trial: Any) -> None:
    """Raise ValueError if a trial of a journal holds something that no search has written."""
    if not isinstance(trial.user_attrs.get("settings", {}), dict):
        raise ValueError(f"the settings of trial {trial.number} are no table")
    if not all(isinstance(value, float) for value in trial.values or ()):
        raise ValueError(f"a result of trial {trial.number} is no number")
    if any(isinstance(value, int) and abs(value) >= 2**63 for value in trial.params.values()):
        raise ValueError(f"a setting of trial {trial.number} is not a number of 64 bits")


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Raise CorruptError if a journal is damaged: Optuna does not check it before reading."""
    remedy = "; choose another --out DIR"
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
        if size > _MOST_BYTES:
            raise CorruptError(f"{path} is not a journal of a search: it has {size} bytes{remedy}")
    except FileNotFoundError:
        if path.is_symlink():
            raise CorruptError(f"{path} is a link to nowhere{remedy}") from None
    except OSError as error:
        raise CorruptError(f"cannot read {path}: {error.strerror}{remedy}") from error
    try:
        yield
    except (HpcdlError, OSError):
        raise
    except Exception as error:  # any failure while reading it
        raise CorruptError(f"{path} is damaged: {type(error).__name__}: {error}{remedy}") from error


def _sampler(search: SearchStudy, num_trials: int) -> Any:
    """Return the sampler of a search. Its seed depends on `num_trials`, so that a resumed search proposes new ones."""
    samplers, plan = _optuna().samplers, search.plan
    seed = (plan.search_seed + _SEED_STEP * num_trials) % 2**32
    with _quiet():
        if plan.sampler == "random":
            return samplers.RandomSampler(seed=seed)
        if plan.sampler == "grid":
            return samplers.GridSampler(
                {dimension.key: list(map(_plain, dimension.grid)) for dimension in search.space}, seed=plan.search_seed
            )
        if plan.sampler == "cma-es":
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        # `group`: dimensions may depend on others. `constant_liar`: trials side by side must not be alike.
        return samplers.TPESampler(
            seed=seed, n_startup_trials=_STARTUP, multivariate=True, group=True, constant_liar=True
        )


def _pruner(search: SearchStudy) -> Any:
    pruners = _optuna().pruners
    if not search.plan.halving:
        return pruners.NopPruner()
    with _quiet():
        # Asynchronous (Li et al., MLSys 2020): no trial waits for others to reach its epoch.
        return pruners.SuccessiveHalvingPruner(
            min_resource=search.plan.min_epochs, reduction_factor=search.plan.reduction
        )


def _suggest(trial: Any, dimension: Dimension) -> Any:
    if dimension.choices:
        chosen = trial.suggest_categorical(dimension.key, [_plain(choice) for choice in dimension.choices])
        return next(choice for choice in dimension.choices if _plain(choice) == chosen)
    step: dict[str, Any] = (
        {} if dimension.step is None else {"step": int(dimension.step) if dimension.whole else float(dimension.step)}
    )
    if dimension.whole:
        return trial.suggest_int(dimension.key, int(dimension.low), int(dimension.high), log=dimension.log, **step)
    return trial.suggest_float(dimension.key, dimension.low, dimension.high, log=dimension.log, **step)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
