"""hpcdl in a user's own Keras script: `init`, `DistributedOptimizer`, `callbacks`, under `mpiexec -n N`.

Three lines make `model.fit` synchronous over the ranks. This module keeps one communicator for the process, as MPI
itself does; everything else in hpcdl is handed its communicator.
"""

from __future__ import annotations

import atexit
import dataclasses
import shutil
import sys
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hpcdl.core.errors import UsageError, original
from hpcdl.core.protocols import Communicator

if TYPE_CHECKING:
    from hpcdl.comm.observed import Observed

_session: list[Communicator] = []


def init(stall_timeout_s: float = 300.0) -> None:
    """Join the ranks of the launcher, or be the only rank where there is none; call it before importing TensorFlow.

    From then on a rank that waits for `stall_timeout_s` seconds for one that is gone, stopped or in another operation
    ends the job with one line that says so.
    """
    from hpcdl.cluster.environment import placement
    from hpcdl.comm.observed import observe
    from hpcdl.training.session.rank import ALONE, communicator_for, set_up_process

    if _session:
        return
    place = placement() or ALONE
    set_up_process(place.local_rank)
    joined = observe(communicator_for(place))
    _session.append(joined)
    if place.size > 1:
        sys.excepthook = _end_all_ranks
        _watch(joined, stall_timeout_s)


def _watch(joined: Observed, stall_timeout_s: float) -> None:
    """Watch this rank until the script is over; the ranks leave their notes in a folder of the user's cache."""
    from hpcdl.comm.agree import decided
    from hpcdl.core.paths import user_cache_folder
    from hpcdl.training.session.watch import FOLDER, Limits, watch_of

    folder = Path(decided(joined, lambda: str(user_cache_folder() / FOLDER / uuid.uuid4().hex)))
    joined.observation.role = "script"
    joined.observation.doing("running the script")
    watch = watch_of(joined, folder)
    watch.limits = Limits(stall_s=stall_timeout_s)
    watch.hosts = dict(enumerate(joined.allgather_json(joined.host)))
    watch.start()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(watch.stop)


def _end_all_ranks(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An error that nobody catches ends the job: the other ranks would wait for this one for ever."""
    from hpcdl.training.session.rank import one_line, verdict

    mine, found = communicator(), original(error)
    last = f"hpcdl: rank {mine.rank} on {mine.host}: {one_line(found)}\n"
    sys.stderr.write("".join([*traceback.format_exception(kind, error, trace), last]))  # in one piece
    mine.abort(130 if issubclass(kind, KeyboardInterrupt) else verdict(found)[1])


def communicator() -> Communicator:
    """The communicator of all ranks."""
    if not _session:
        raise UsageError("hpcdl.init() has not been called; call it at the top of the script")
    return _session[0]


def rank() -> int:
    """This process's number, 0 to size() - 1."""
    return communicator().rank


def size() -> int:
    """Number of processes."""
    return communicator().size


def DistributedOptimizer(optimizer: Any, strategy: str = "ring", **exchange: Any) -> Any:  # noqa: N802  as Keras names
    """A Keras optimizer like `optimizer` that averages gradients over the ranks before it applies them.

    `strategy` is one whose features say `keras_fit`; `exchange` takes `bucket_size` and `compress`. The optimizer is
    saved with a model under its own Keras class, so the model loads without hpcdl. XLA cannot compile the exchange:
    leave `jit_compile` at its default on CPUs, or set it to False. Under the global policy `mixed_float16` it scales
    the loss, outside the exchange: all ranks then skip the same steps.
    """
    import keras

    from hpcdl.config.schema import ExchangeConfig, OptimizerConfig
    from hpcdl.strategies.base import Context
    from hpcdl.strategies.table import find_strategy, load_strategy

    info = find_strategy(strategy)
    if not info.features.keras_fit:
        raise UsageError(f"strategy {strategy!r} does not go with Keras fit; `hpcdl strategies --json` shows which do")
    context = Context(
        info=info,
        communicator=communicator(),
        num_workers=size(),
        num_servers=0,
        exchange=dataclasses.replace(ExchangeConfig(strategy=strategy), **exchange),
        optimizer=OptimizerConfig(),
    )
    worker: Any = load_strategy(info).worker(context)
    scaler = keras.optimizers.LossScaleOptimizer
    if keras.mixed_precision.global_policy().name == "mixed_float16" and not isinstance(optimizer, scaler):
        optimizer = scaler(optimizer)
    plain = type(optimizer)
    worker.checks_finite = not isinstance(optimizer, scaler)

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        names = [item.path for item in trainable_variables or self._trainable_variables]
        plain.apply(self, worker.average(list(grads), names), trainable_variables)

    # The same module and name: Keras then writes the plain class into saved models.
    members = {"apply": apply, "__module__": plain.__module__, "__qualname__": plain.__qualname__, "exchanges": True}
    distributed: Any = type(plain.__name__, (plain,), members)
    return distributed.from_config(optimizer.get_config())


def callbacks() -> Any:
    """One Keras callback: everybody starts with rank 0's weights, and logs are means over the ranks."""
    from hpcdl.training.keras.callback import AgreeOverRanks

    return AgreeOverRanks(communicator())
