"""A step whose numbers are not finite ends the run, and says which samples it was about."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

from hpcdl.core.errors import NotFiniteError

MOST_NAMED = 16


def check_loss(loss: float, step: int, rank: int) -> None:
    """NotFiniteError where the loss is not a finite number though its gradients were."""
    if not math.isfinite(loss):
        raise NotFiniteError(f"loss is {loss} at step {step} on rank {rank}")


@contextlib.contextmanager
def naming_samples(ids_of_batch: Callable[[], Sequence[int]], way_back: Callable[[], str]) -> Iterator[None]:
    """Inside, an error of numbers that are not finite also names the samples of the batch, and how to continue."""
    try:
        yield
    except NotFiniteError as error:
        ids = ids_of_batch()
        shown = ", ".join(str(sample) for sample in ids[:MOST_NAMED])
        more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
        raise NotFiniteError(
            f"{error}; samples of the batch: {shown}{more}; "
            f"lower --learning-rate, add --warmup-epochs, or look at these samples; {way_back()}"
        ) from error
