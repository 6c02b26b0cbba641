"""Detect training on several ranks without distribution: each rank would train its own model, unnoticed.

Keras is watched from its import on, whenever the script imports it. Training counts as distributed after an exchange of
gradients (or any sum of arrays over the ranks) since the fit began; in a custom loop, since the last fit ended. Even
then an optimizer may move weights that no exchange covers: one of the two optimizers of a GAN, for example. Updates by
hand (`weight.assign_sub(rate * gradient)`) are found by the tape that computed a gradient of the assigned variable.
Variables outside Keras, as the picture of a style transfer, may be computed alike on all ranks: the end shows it.
A script that imports mpi4py may average gradients or weights itself, which hpcdl does not see: the end shows this, too,
and whether one that calls hpcdl.allreduce has averaged weights after steps of each rank (federated averaging, Reptile).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hpcdl.core.errors import UsageError
from hpcdl.core.paths import BACKEND_VARIABLE, TENSORFLOW
from hpcdl.core.units import listed

if TYPE_CHECKING:
    from hpcdl.core.protocols import Communicator

ALLOWED_VARIABLE = "HPCDL_ALLOW_UNDISTRIBUTED"
"""Set in the ranks of `hpcdl run --allow-undistributed`."""
CHOSEN = "over_ranks"
"""The attribute of a variable that holds the argument of `hpcdl.combine`."""
_REMEDY = "write optimizer=hpcdl.DistributedOptimizer({name}(...)), or use hpcdl.DistributedGradientTape"
FIT = "model.fit"
_OWN_LOOP = "a loop of its own"
_MOST_COMPARED = 8
"""How many variables are kept and compared at the end."""
_IMPORTS_MPI4PY = re.compile(r"^\s*(?:from|import)\s+mpi4py\b", re.MULTILINE)
_AVERAGES = re.compile(
    r"^(?!.*grad)(?=[^#\n]*(?:weights|variables))[^#\n]*allreduce\("
    r"|(?:weights|variables)[^#\n]*:\n(?!.*grad)[^#\n]*allreduce\(",
    re.MULTILINE,
)
"""A line of a script that sums weights over the ranks, or the line after `for weight in model.weights:`."""
_MEANT = "where that is meant, add --allow-undistributed before the script"


class TrainingWatch:
    """Checks the updates of optimizers that are not distributed. `refuses`: a script with no exchange at all fails.

    `initialized`: whether the script has called hpcdl.init(), without which nothing in it can be distributed.
    """

    def __init__(
        self, num_ranks: int, warn: Callable[[str], None], initialized: Callable[[], bool], *, refuses: bool
    ) -> None:
        self._num_ranks, self._warn = num_ranks, warn
        self._initialized, self._refuses = initialized, refuses
        self._exchanges = self._before = self._last_sum = 0
        self._exchanged: set[str] = set()
        self._taped: set[str] = set()
        """Keys of variables whose gradients a tape has computed before any exchange."""
        self._distributed = False
        """Whether the script has made an optimizer or a tape distributed: only then may hpcdl itself set weights."""
        self._loop = _OWN_LOOP
        self._kept: dict[str, tuple[Any, str]] = {}
        """By key, variables that ranks may hold alike although hpcdl exchanges nothing for them, and their warning."""
        self._warned: dict[str, str] = {}
        self._noted = False

    @property
    def loop(self) -> str:
        """What trains at the moment."""
        return self._loop

    def exchanged(self, variables: Iterable[Any] | None, shapes: Collection[tuple[int | None, ...]] = ()) -> None:
        """Record that gradients of `variables`, or other arrays (None), are summed over ranks. Called in tracing.

        `shapes`: those of the arrays. The script has averaged variables of such a shape.
        """
        self._exchanges += 1
        if variables is None:
            self._last_sum = self._exchanges
            self._kept = {key: kept for key, kept in self._kept.items() if tuple(kept[0].shape) not in shapes}
        else:
            self._exchanged.update(map(_key_of, variables))

    def judge(self, optimizer: Any, grads: Any, variables: Any) -> None:
        """Warn once per kind of loop if `optimizer` moves weights in which no other rank takes part.

        Raises UsageError at once if nothing in the script can be distributed.
        """
        # The attribute that a distributed optimizer has, or an inner one of it.
        if hasattr(optimizer, "counts_samples") or self._last_sum > self._before:
            return
        name = type(optimizer).__name__
        text = f"{self._loop} with {name} on {self._num_ranks} ranks"
        remedy = _REMEDY.format(name=name)
        if _in_strategy():
            remedy = f"leave `with strategy.scope()` of tf.distribute out, and {remedy}"
        moved = _moved_together(optimizer, grads, variables)
        alone = [weight for weight in moved if _key_of(weight) not in self._exchanged]
        with_exchange = self._exchanges > self._before
        if (with_exchange and not alone) or (self._exchanges and not moved):
            return
        keras_moves = any(hasattr(weight, "path") for weight in alone)  # only Keras's variables have one
        later = self._exchanges and self._loop == _OWN_LOOP and alone and not keras_moves
        if with_exchange or later:
            text = (
                f"{text} moves {listed(list(map(_name_of, alone)), 1)}, whose gradients are not exchanged: each rank "
                f"trains them alone; {remedy}, or hpcdl.combine(variables, 'own') where that is meant"
            )
        else:
            text = f"{text}, in which nothing is distributed: each rank trains a model of its own; {remedy}"
        if later:
            self._keep(alone, text)
        elif not self._exchanges and imports_mpi4py():
            self._keep(alone, text)
            self._note("The script imports mpi4py", remedy)
        elif alone and self._initialized() and _in_script(_AVERAGES):
            self._keep(alone, text)
            self._note("The script calls hpcdl.allreduce", remedy)
        else:
            self._complain(text)

    def _keep(self, weights: Sequence[Any], text: str) -> None:
        """Keep variables that are compared at the end: only if they differ `text` is true."""
        for weight in weights[: _MOST_COMPARED - len(self._kept)]:
            self._kept.setdefault(_key_of(weight), (weight, text))

    def made_distributed(self) -> None:
        """Record that the script has made an optimizer or a tape distributed."""
        self._distributed = True

    def taped(self, sources: Any) -> None:
        """Record the variables among `sources`, whose gradients a tape computes."""
        # After the first exchange this question is settled, and tapes cost nothing more.
        if not self._exchanges:
            from tensorflow import nest  # a tape exists, so TensorFlow has been imported

            self._taped.update(_key_of(source) for source in nest.flatten(sources) if hasattr(source, "assign"))

    def assigned(self, variable: Any) -> None:
        """Warn once if the script itself updates a variable by its gradient before anything is exchanged."""
        settled = self._exchanges or self._distributed or self._warned or self._noted
        if settled or _key_of(variable) not in self._taped:
            return
        text = (
            f"a loop that updates variables by hand on {self._num_ranks} ranks, in which nothing is distributed: each "
            "rank trains a model of its own; use hpcdl.DistributedGradientTape"
        )
        if imports_mpi4py():
            self._keep([variable], text)
            self._note("The script imports mpi4py", "use hpcdl.DistributedGradientTape")
        else:
            self._complain(text)

    def _note(self, why: str, remedy: str) -> None:
        """Say once, before hours are spent, what only the end can show."""
        if not self._noted:
            self._noted = True
            self._warn(
                f"{self._loop} exchanges nothing through hpcdl. {why}: unless it averages gradients or weights itself, "
                f"each rank trains alone; then {remedy}. The end compares the weights"
            )

    def _complain(self, text: str) -> None:
        """Print a warning once. Raises UsageError if nothing in the script can be distributed."""
        if self._refuses and not self._initialized():
            raise UsageError(f"{text}, after hpcdl.init(); {_MEANT}")
        if text not in self._warned:
            self._warned[text] = text
            self._warn(text)

    def differing(self, communicator: Communicator) -> list[str]:
        """Return the warnings for variables kept that ranks have moved to different values. Collective."""
        from hpcdl.supervision.control import digest_of

        kept = list(self._kept.values())
        mine = [[digest_of(weight), text] for weight, text in kept]
        texts = dict[str, str]()
        # A rank that has not moved one, as in `if hpcdl.rank() == 0`, has nothing to compare.
        for row in itertools.zip_longest(*communicator.allgather_json(mine)):
            found = [one for one in row if one is not None]
            # Without an exchange by hpcdl's functions or mpi4py they are equal by the same data, and trained twice.
            if len({digest for digest, _ in found}) > 1 or not (self._exchanges or imports_mpi4py()):
                texts[found[0][1]] = ""
        self._warned |= {text: text for text in texts}
        return list(texts)

    def check_end(self) -> None:
        """Raise UsageError at the end of a script that has trained without distributing anything."""
        if self._refuses and self._warned and not self._exchanges:
            raise UsageError(f"{next(iter(self._warned))}; {_MEANT}")

    def inside(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `plain`, a training method of a model: exchanges before it do not count for it."""

        @functools.wraps(plain)
        def training(*args: Any, **kwargs: Any) -> Any:
            outer, self._loop, self._before = self._loop, name, self._exchanges
            try:
                return plain(*args, **kwargs)
            finally:
                self._loop, self._before = outer, self._exchanges

        return training


_watches: list[TrainingWatch] = []


def in_fit() -> bool:
    """Return whether a `fit` of a model is under way on one of several ranks."""
    return any(watch.loop == FIT for watch in _watches)


def _key_of(variable: Any) -> str:
    """Return a key that identifies a variable, the same for Keras's and TensorFlow's object of it."""
    unique_id = getattr(getattr(variable, "value", None), "_unique_id", None)
    return str(unique_id or getattr(variable, "_unique_id", id(variable)))


def _in_strategy() -> bool:
    """Return whether the caller is inside a strategy of tf.distribute."""
    from tensorflow import distribute  # an optimizer of Keras exists, so TensorFlow has been imported

    return bool(distribute.has_strategy())


def _moved_together(optimizer: Any, grads: Any, variables: Any) -> list[Any]:
    """Return the weights that have a gradient and are not chosen as a rank's own."""
    from hpcdl.step.keras_internals import trained_by  # Keras has been imported by then

    moved = list(trained_by(optimizer) if variables is None else variables)
    gradients = grads if isinstance(grads, list | tuple) and len(grads) == len(moved) else [True] * len(moved)
    return [
        weight
        for weight, grad in zip(moved, gradients, strict=True)
        if grad is not None and getattr(weight, CHOSEN, None) != "own"
    ]


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", None) or getattr(variable, "name", "a variable")).removesuffix(":0")


def note_exchange(variables: Iterable[Any] | None = None, shapes: Collection[tuple[int | None, ...]] = ()) -> None:
    """Record that gradients of `variables`, or other arrays of the script (None), are combined over the ranks."""
    for watch in _watches:
        watch.exchanged(variables, shapes)


def note_distributed() -> None:
    """Record that the script has made an optimizer or a tape distributed."""
    for watch in _watches:
        watch.made_distributed()


def check_end() -> None:
    """Raise UsageError if a script under `hpcdl run` has trained one model per rank without being allowed to."""
    for watch in _watches:
        watch.check_end()


def differing_variables(communicator: Communicator) -> list[str]:
    """Return what to warn of when every rank's script is over: see `TrainingWatch.differing`. Collective."""
    return [text for watch in _watches for text in watch.differing(communicator)]


def imports_mpi4py() -> bool:
    """Return whether the script's own file imports mpi4py, whose messages hpcdl does not see."""
    return _in_script(_IMPORTS_MPI4PY)


@functools.cache
def _in_script(pattern: re.Pattern[str]) -> bool:
    """Return whether the script's own file has the pattern."""
    with contextlib.suppress(OSError):
        return bool(pattern.search(Path(sys.argv[0]).read_text(encoding="utf-8", errors="replace")))
    return False


def nothing_exchanged(num_ranks: int) -> str:
    """Return the warning for a script whose ranks have called nothing of hpcdl together; empty where that is meant."""
    if num_ranks == 1 or os.environ.get(ALLOWED_VARIABLE) or imports_mpi4py():
        return ""
    return (
        f"the {num_ranks} ranks exchanged nothing through hpcdl: each did the script's work by itself. To train one "
        f"model use hpcdl.DistributedOptimizer or hpcdl.DistributedGradientTape; {_MEANT}"
    )


def watch_training(
    num_ranks: int, warn: Callable[[str], None], initialized: Callable[[], bool], *, under_run: bool
) -> None:
    """Check all later training on this rank. Only the first call counts."""
    after_import("keras.src.backend.config", _check_backend_of)
    if num_ranks == 1 or _watches:
        return
    watch = TrainingWatch(num_ranks, warn, initialized, refuses=under_run and not os.environ.get(ALLOWED_VARIABLE))
    _watches.append(watch)

    def of_optimizer(module: ModuleType) -> None:
        plain = module.BaseOptimizer.apply

        @functools.wraps(plain)
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            watch.judge(self, grads, trainable_variables)
            return plain(self, grads, trainable_variables)

        module.BaseOptimizer.apply = _unconverted(apply)

    def of_trainer(module: ModuleType) -> None:
        trainer = module.TensorFlowTrainer
        for name in ("fit", "train_on_batch"):
            setattr(trainer, name, watch.inside(f"model.{name}", getattr(trainer, name)))

    after_import("keras.src.optimizers.base_optimizer", of_optimizer)
    after_import("keras.src.backend.tensorflow.trainer", of_trainer)
    _watch_updates_by_hand(watch)


def _watch_updates_by_hand(watch: TrainingWatch) -> None:
    """Call `watch.taped` with the sources of each gradient, and `watch.assigned` before each variable changes."""

    def of_tape(module: ModuleType) -> None:
        plain = module.GradientTape.gradient

        @functools.wraps(plain)
        def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
            watch.taped(sources)
            return plain(self, target, sources, *args, **kwargs)

        module.GradientTape.gradient = _unconverted(gradient)

    def of_variable(module: ModuleType) -> None:
        def watched(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
                watch.assigned(self)
                return plain(self, *args, **kwargs)

            return _unconverted(assign)

        for name in ("assign", "assign_add", "assign_sub"):
            setattr(module.BaseResourceVariable, name, watched(getattr(module.BaseResourceVariable, name)))

    after_import("tensorflow.python.eager.backprop", of_tape)
    after_import("tensorflow.python.ops.resource_variable_ops", of_variable)


def _unconverted(function: Callable[..., Any]) -> Callable[..., Any]:
    vars(function)["autograph_info__"] = {}  # TensorFlow's mark of functions that AutoGraph does not convert
    return function


def _check_backend_of(module: ModuleType) -> None:
    """Raise UsageError if the script itself has chosen another backend, before Keras imports it."""
    if module.backend() != TENSORFLOW:
        raise UsageError(
            f"this script has Keras compute with {module.backend()}: hpcdl trains with Keras on TensorFlow alone; set "
            f"{BACKEND_VARIABLE}={TENSORFLOW}"
        )


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` with a module: at once if it has been imported, else right after its import."""
    if name in sys.modules:
        change(sys.modules[name])
    else:
        # In the first place, before the finder that would load the module.
        sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and calls a function after it is loaded."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """Return the module's own spec, once, with a loader that calls `change` at its end."""
        if fullname != self._name:
            return None
        # First: `find_spec` below asks all finders, and would ask this one again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                self._change(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec
