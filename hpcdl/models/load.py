"""From `--model` to a Keras model: a network of the table, or the user's own function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcdl.config.schema import CROSS_ENTROPY
from hpcdl.core.errors import UsageError
from hpcdl.models.functions import ASKED, call, failed, kind_of, user_function
from hpcdl.models.spec import UserFunction, parse_emulation, parse_spec
from hpcdl.models.table import REGISTRY, check_input, model_info

if TYPE_CHECKING:
    import keras

Shapes = Mapping[str, tuple[int, ...]]


def load_model(
    spec: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | Shapes | None = None,
    loss: str = CROSS_ENTROPY,
    output_shapes: Shapes | None = None,
    scaled: bool = False,
) -> keras.Model:
    """Build the model that `spec` names for `classes` and samples of `input_shape` (H, W, C).

    None means the network's own default. Samples of named fields have any shape, several inputs one by name; their
    targets have `output_shapes`. `loss` says what outputs have to be; `scaled`, that inputs come from 0 to 1. Raises
    UsageError for everything that is wrong with the spec, the arguments or the user's function, naming the function's
    file and line.
    """
    builder = parse_spec(spec)
    shape = input_shape if input_shape is None or isinstance(input_shape, Mapping) else tuple(input_shape)
    if isinstance(builder, str):
        if isinstance(shape, Mapping):
            raise UsageError(f"{builder} takes one input, the data has {', '.join(shape)}; give FILE.py:build")
        info = model_info(builder)
        num_classes = info.classes if classes is None else classes
        shape = info.input_shape if shape is None else shape
        check_input(builder, num_classes, shape)
        model: keras.Model = REGISTRY.load(builder)(num_classes, shape)
        if emulation := parse_emulation(spec):
            from hpcdl.models.emulated import emulated

            model = emulated(model, emulation)
        if loss != CROSS_ENTROPY:
            _check(model, spec, loss, num_classes, shape, output_shapes)
        return model
    given = {"num_classes": classes, "input_shape": shape}
    made = call(builder, user_function(builder), {name: value for name, value in given.items() if value is not None})
    model = _built(builder, made, shape)
    _check(model, str(builder), loss, classes, shape, output_shapes, scaled=scaled)
    return model


def _check(
    model: keras.Model,
    spec: str,
    loss: str,
    classes: int | None,
    shape: tuple[int, ...] | Shapes | None,
    output_shapes: Shapes | None,
    *,
    scaled: bool = False,
) -> None:
    from hpcdl.models.check import check_model

    check_model(
        model, spec=spec, loss=loss, classes=classes, input_shape=shape, output_shapes=output_shapes, scaled=scaled
    )


def _built(builder: UserFunction, model: Any, input_shape: tuple[int, ...] | Shapes | None) -> keras.Model:
    """What the user's function returned, with its weights; UsageError where it is not a model, or has none."""
    import keras

    if not isinstance(model, keras.Model):
        raise UsageError(
            f"{builder.what} {str(builder)!r} returned {kind_of(model)}, not a Keras model; {ASKED[builder.what]}"
        )
    if not model.built and input_shape is not None:
        try:
            # A call builds layers that a class makes in its __init__ too; build() would only mark it as built.
            if isinstance(input_shape, Mapping):
                model({name: keras.Input(shape, name=name) for name, shape in input_shape.items()})
            else:
                model(keras.Input(input_shape))
        except (Exception, SystemExit) as error:  # the user's layers may raise anything
            raise failed(builder, error) from error
    if not model.built:
        raise UsageError(f"{builder.what} {str(builder)!r} has no weights yet; give it a keras.Input")
    return model
