"""A loss whose name is not known is answered with the nearest of hpcdl's and of Keras'."""

from __future__ import annotations

import pytest

from hpcdl.core.errors import UsageError


def test_cross_entropy_is_among_the_losses_that_are_named() -> None:
    import keras

    from hpcdl.step.objective import _function

    with pytest.raises(UsageError, match="did you mean 'cross-entropy'"):
        _function(keras.losses, "loss", "crossentropy")
