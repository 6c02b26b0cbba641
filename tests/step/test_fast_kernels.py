"""Fast kernels give the outputs, gradients and statistics of Keras's layers, and are not used where they cannot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import pytest

if TYPE_CHECKING:
    from hpcdl.core.protocols import Array

NUM_STEPS = 20
SAME_LOSS, SAME_WEIGHTS = 1e-5, 1e-4
BLOCKS: dict[str, tuple[str, ...]] = {
    "resnet": ("batch normalization", "1x1 convolution"),
    "transformer": ("layer normalization", "gelu", "attention"),
    "volumes": ("batch normalization",),
    "series": ("lstm",),
}
"""Small networks, and the kernels that serve them without oneDNN."""


@pytest.fixture(autouse=True)
def plain_after() -> Iterator[None]:
    """Restore Keras after the test."""
    yield
    from hpcdl.step.kernels.table import use_fast_kernels

    use_fast_kernels(on=False)


def made(kind: str) -> Any:
    """Return a small network of smooth functions: if a rectifier flips, a rounding error grows a thousandfold."""
    import keras

    layers = keras.layers
    if kind == "resnet":
        inputs = keras.Input((12, 12, 3))
        x = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
        for _ in range(2):
            y = layers.Activation("tanh")(layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x))
            y = layers.Conv2D(8, 1)(y)
            y = layers.BatchNormalization(center=False)(y)
            x = layers.Add()([x, layers.Conv2D(8, 3, padding="same")(y)])
        return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))
    if kind == "transformer":
        inputs = keras.Input((9, 16))
        x = layers.LayerNormalization()(inputs)
        x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(x, x)])
        x = layers.Dense(32, activation="gelu")(layers.LayerNormalization(epsilon=1e-6)(x))
        return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))
    if kind == "series":
        inputs = keras.Input((7, 5))
        x = layers.Bidirectional(layers.LSTM(6, return_sequences=True))(inputs)
        return keras.Model(inputs, layers.Dense(10)(layers.LSTM(8)(x)))
    inputs = keras.Input((4, 6, 6, 2))
    x = layers.Conv3D(4, 3, padding="same")(inputs)
    x = layers.Activation("tanh")(layers.BatchNormalization(scale=False)(x))
    x = layers.BatchNormalization()(layers.Dense(12)(layers.Flatten()(x)))
    return keras.Model(inputs, layers.Dense(10)(x))


def trained(
    kind: str, *, fast: bool, path: Path | None = None
) -> tuple[list[float], dict[str, Array], tuple[str, ...]]:
    """Return the loss of each of 20 steps, the final weights, and the active kernels."""
    import keras
    import tensorflow as tf

    from hpcdl.config.schema import OptimizerConfig
    from hpcdl.step.kernels.table import use_fast_kernels
    from hpcdl.step.objective import Classification
    from hpcdl.step.optimizers import build_optimizer
    from hpcdl.step.step import build_step
    from hpcdl.strategies.single import SingleWorker

    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    model = made(kind)
    found = use_fast_kernels(model, on=fast)
    assert not found.warnings
    config = OptimizerConfig(optimizer="momentum", learning_rate=0.02)
    step = build_step(model, build_optimizer(config, model.trainable_variables), SingleWorker(), Classification())
    generator, losses = numpy.random.default_rng(1), []
    for _ in range(NUM_STEPS):
        inputs = generator.standard_normal((8, *model.input_shape[1:]), numpy.float32) + 0.5
        labels = generator.integers(0, 10, 8)
        losses.append(float(step(tf.constant(inputs), tf.constant(labels))[0]))
    if path is not None:
        model.save(path)
    return losses, {variable.path: variable.numpy() for variable in model.weights}, found.names


@pytest.mark.long
@pytest.mark.parametrize("kind", BLOCKS)
def test_twenty_steps_are_those_of_keras(kind: str, tmp_path: Path) -> None:
    """Losses, weights and moving statistics of twenty steps equal Keras's; the file evaluates alike in plain Keras."""
    import keras

    from hpcdl.step.keras_internals import onednn_in_use
    from hpcdl.step.kernels.table import TABLE, use_fast_kernels

    without = {kernel.name for kernel in TABLE if kernel.without_onednn} if onednn_in_use() else set()
    plain, weights, none = trained(kind, fast=False)
    fast, own_weights, names = trained(kind, fast=True, path=tmp_path / "model.keras")
    assert none == () and names == tuple(name for name in BLOCKS[kind] if name not in without)
    numpy.testing.assert_allclose(fast, plain, rtol=SAME_LOSS)
    assert weights.keys() == own_weights.keys()
    others = [name for name, value in weights.items() if (own_weights[name] != value).any()]
    assert others or kind == "transformer", "the fast kernels were not used"
    for name, value in weights.items():
        numpy.testing.assert_allclose(own_weights[name], value, atol=SAME_WEIGHTS, err_msg=name)
    use_fast_kernels(on=False)
    again = keras.saving.load_model(tmp_path / "model.keras")
    for name, value in zip(own_weights, again.weights, strict=True):
        numpy.testing.assert_array_equal(own_weights[name], value.numpy())
    assert not any("hpcdl" in str(layer.get_config()) for layer in again.layers)


def of_layer(layer: Any, inputs: Any, *, fast: bool, **named: Any) -> list[Array]:
    """Return outputs, gradients and statistics of one call in a graph, and restore the statistics."""
    import tensorflow as tf

    from hpcdl.step.kernels.table import use_fast_kernels

    use_fast_kernels(on=fast)
    before = [variable.numpy() for variable in layer.non_trainable_variables]

    @tf.function(autograph=False)
    def once() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = layer(inputs, **named)
            upstream = tf.cast(tf.reshape(tf.range(tf.size(outputs)) % 7 - 3, tf.shape(outputs)), outputs.dtype)
        sources = [inputs, *(variable.value for variable in layer.trainable_variables)]
        return outputs, tape.gradient(outputs, sources, upstream)

    outputs, gradients = once()
    found = [outputs, *gradients, *(variable.numpy() for variable in layer.non_trainable_variables)]
    for variable, value in zip(layer.non_trainable_variables, before, strict=True):
        variable.assign(value)
    return [numpy.asarray(one, numpy.float64) for one in found]


def activated(activation: Any, **named: Any) -> Any:
    """Return a model of one activation."""
    import keras

    return keras.Sequential([keras.layers.Activation(activation, **named)])


def approximate_gelu(values: Any) -> Any:
    import keras

    return keras.activations.gelu(values, approximate=True)


SOME = numpy.arange(3 * 6 * 6).reshape(3, 6, 6) % 5 > 1


def attending(layers: Any, *, kind: str = "MultiHeadAttention", **named: Any) -> Any:
    """Return self-attention as a layer of one input."""
    import keras

    heads = {"num_heads": 2, "key_dim": 4} if kind == "MultiHeadAttention" else {
        "num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    }  # fmt: skip

    class SelfAttention(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.attention = getattr(layers, kind)(**heads, **named)

        def build(self, shape: Any) -> None:
            self.attention.build(shape, shape)

        def call(
            self, values: Any, attention_mask: Any = None, use_causal_mask: bool = False, training: Any = None
        ) -> Any:
            return self.attention(
                values, values, attention_mask=attention_mask, use_causal_mask=use_causal_mask, training=training
            )

    return SelfAttention()


CASES: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], dict[str, Any]]] = {
    "pictures": (lambda layers: layers.BatchNormalization(), (4, 6, 5, 3), {"training": True}),
    "one row": (lambda layers: layers.BatchNormalization(), (1, 3), {"training": True}),
    "no scale": (lambda layers: layers.BatchNormalization(scale=False), (7, 3), {"training": True}),
    "no center": (lambda layers: layers.BatchNormalization(center=False), (3, 5, 3), {"training": True}),
    "channels first": (lambda layers: layers.BatchNormalization(axis=1), (4, 3, 6, 5), {"training": True}),
    "evaluating": (lambda layers: layers.BatchNormalization(), (4, 6, 5, 3), {"training": False}),
    "frozen": (lambda layers: layers.BatchNormalization(trainable=False), (4, 6, 5, 3), {"training": True}),
    "bfloat16": (lambda layers: layers.BatchNormalization(dtype="mixed_bfloat16"), (4, 6, 5, 3), {"training": True}),
    "bfloat16 alone": (lambda layers: layers.BatchNormalization(dtype="bfloat16"), (4, 6, 5, 3), {"training": True}),
    "rows": (lambda layers: layers.LayerNormalization(), (6, 5), {}),
    "rows of bfloat16 alone": (lambda layers: layers.LayerNormalization(dtype="bfloat16"), (6, 2, 5), {}),
    "rows of bfloat16": (lambda layers: layers.LayerNormalization(dtype="mixed_bfloat16"), (6, 2, 5), {}),
    "two axes": (lambda layers: layers.LayerNormalization(axis=(1, 2)), (6, 4, 5), {}),
    "no offset": (lambda layers: layers.LayerNormalization(center=False), (6, 5), {}),
    "gelu": (lambda layers: activated("gelu"), (6, 5), {"training": True}),
    "approximate gelu": (lambda layers: activated(approximate_gelu), (6, 2, 5), {"training": True}),
    "silu": (lambda layers: activated("silu"), (6, 5), {"training": True}),
    "hard silu": (lambda layers: activated("hard_silu"), (6, 5), {"training": True}),
    "gelu of bfloat16": (lambda layers: activated("gelu", dtype="bfloat16"), (6, 5), {"training": True}),
    "attention": (lambda layers: attending(layers), (3, 6, 8), {"training": True}),
    "attention to what came before": (
        lambda layers: attending(layers),
        (3, 6, 8),
        {"use_causal_mask": True, "training": True},
    ),
    "attention to some": (lambda layers: attending(layers), (3, 6, 8), {"attention_mask": SOME, "training": True}),
    "attention to some before": (
        lambda layers: attending(layers),
        (3, 6, 8),
        {"attention_mask": SOME, "use_causal_mask": True, "training": True},
    ),
    "attention with dropout": (lambda layers: attending(layers, dropout=0.5), (3, 6, 8), {"training": False}),
    "attention of bfloat16": (
        lambda layers: attending(layers, dtype="mixed_bfloat16"),
        (3, 6, 8),
        {"training": True},
    ),
    "attention over two axes": (
        lambda layers: attending(layers, attention_axes=(1, 2)),
        (3, 2, 3, 8),
        {"training": True},
    ),
    "two queries a key": (
        lambda layers: attending(layers, kind="GroupQueryAttention"),
        (3, 6, 8),
        {"training": True},
    ),
    "series": (lambda layers: layers.LSTM(4, return_sequences=True), (3, 6, 5), {"training": True}),
    "last of a series": (lambda layers: layers.LSTM(4), (3, 6, 5), {"training": True}),
    "series from its end": (lambda layers: layers.LSTM(4, go_backwards=True), (3, 6, 5), {"training": True}),
    "one step": (lambda layers: layers.LSTM(4), (3, 1, 5), {"training": True}),
    "series without offset": (lambda layers: layers.LSTM(4, use_bias=False), (3, 6, 5), {"training": True}),
    "series of bfloat16": (lambda layers: layers.LSTM(4, dtype="mixed_bfloat16"), (3, 6, 5), {"training": True}),
    "series evaluated": (lambda layers: layers.LSTM(4), (3, 6, 5), {"training": False}),
    "1x1": (lambda layers: layers.Conv2D(4, 1, activation="tanh"), (3, 5, 4, 6), {}),
    "1x1 in steps": (lambda layers: layers.Conv2D(4, 1, strides=2), (3, 5, 4, 6), {}),
    "1x1 of bfloat16": (lambda layers: layers.Conv2D(4, 1, dtype="mixed_bfloat16"), (3, 5, 4, 6), {}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_layer_gives_what_keras_gives(name: str) -> None:
    import keras
    import tensorflow as tf

    make, shape, named = CASES[name]
    inputs = tf.constant(numpy.random.default_rng(2).standard_normal(shape, numpy.float32) * 3 + 5)
    layer = make(keras.layers)
    layer(inputs, **named)
    plain, fast = (of_layer(layer, inputs, fast=fast, **named) for fast in (False, True))
    tolerance = 2e-2 if "bfloat16" in name else 2e-5
    for one, other in zip(plain, fast, strict=True):
        numpy.testing.assert_allclose(other, one, atol=tolerance * max(numpy.abs(one).max(), 1.0))


def test_a_mask_is_respected() -> None:
    import keras
    import tensorflow as tf

    inputs = tf.constant(numpy.random.default_rng(2).standard_normal((4, 5, 3), numpy.float32))
    mask = tf.constant(numpy.arange(20).reshape(4, 5) % 3 > 0)
    layer = keras.layers.BatchNormalization()
    layer(inputs)
    plain, fast = (of_layer(layer, inputs, fast=fast, training=True, mask=mask) for fast in (False, True))
    for one, other in zip(plain, fast, strict=True):
        numpy.testing.assert_array_equal(other, one)


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.5}, {"recurrent_dropout": 0.5}, {"activation": "relu"}, {"recurrent_activation": "tanh"},
        {"unroll": True}, {"use_bias": False}, {"mask": True}, {"training": False}, {"length": None},
    ],
    ids=lambda settings: next(iter(settings)),
)  # fmt: skip
def test_an_lstm_of_another_kind_stays_kerass(settings: dict[str, Any]) -> None:
    import keras
    import tensorflow as tf

    from hpcdl.step.kernels.table import TABLE

    (kernel,) = [kernel for kernel in TABLE if kernel.name == "lstm"]
    ways = {"mask": None, "training": True, "length": 6}

    def chosen(layer: Any, *, mask: Any, training: Any, length: int | None) -> Any:
        found = []

        @tf.function(input_signature=[tf.TensorSpec((3, length, 5))])
        def traced(sequences: Any) -> None:
            found.append(kernel.chosen(layer, sequences, [], mask, training=training))

        traced.get_concrete_function()
        return found[0]

    assert chosen(keras.layers.LSTM(4), **ways) is not None
    given = {name: value for name, value in settings.items() if name in ways}
    layer = keras.layers.LSTM(4, **{name: value for name, value in settings.items() if name not in ways})
    assert chosen(layer, **{**ways, **given}) is None


def test_activations_and_attention_are_others_while_a_model_trains_and_no_longer() -> None:
    """Activations and attention change only in training: exports, evaluation and other calls must not require XLA."""
    import keras
    import tensorflow as tf

    from hpcdl.step.kernels.table import use_fast_kernels

    names = use_fast_kernels(model := made("transformer")).names
    assert {"gelu", "attention"} < {*names}

    def operations(training: bool | None) -> list[str]:
        spec = tf.TensorSpec((2, 9, 16), tf.float32)
        traced = tf.function(lambda values: model(values, training=training), autograph=False)
        return [operation.type for operation in traced.get_concrete_function(spec).graph.get_operations()]

    plain, fast = operations(False), operations(True)
    assert plain == operations(None)
    assert plain.count("Erfc") == 1 and "Erfc" not in fast
    assert plain.count("Einsum") == fast.count("Einsum") + 2
    traced = tf.function(keras.activations.gelu, autograph=False).get_concrete_function(tf.TensorSpec((3, 5)))
    assert "Erfc" in {operation.type for operation in traced.graph.get_operations()}


def test_the_log_separates_what_only_own_layers_might_call() -> None:
    import keras

    from hpcdl.step.kernels.table import use_fast_kernels

    class Own(keras.layers.Layer):
        def call(self, values: Any) -> Any:
            return 2 * values

    needed = keras.layers.LayerNormalization()
    line = use_fast_kernels(keras.Sequential([keras.Input((4,)), needed, Own()])).line()
    assert line.startswith("fast kernels: layer normalization; if your own layers call them: batch normalization, ")
    assert use_fast_kernels(keras.Sequential([needed])).line() == "fast kernels: layer normalization"
    assert use_fast_kernels(keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])).line() == ""
    assert use_fast_kernels(keras.Sequential([Own()])).line().startswith("fast kernels: if your own layers call them")


def test_operations_between_layers_are_found() -> None:
    import keras

    from hpcdl.step.kernels.table import use_fast_kernels

    inputs = keras.Input((4, 2, 8))
    attended = keras.ops.dot_product_attention(inputs, inputs, inputs)
    inner = keras.Model(inputs, keras.ops.hard_silu(keras.ops.silu(attended)))
    assert use_fast_kernels(keras.Sequential([inner])).names == ("silu", "hard silu", "attention")
    assert use_fast_kernels(keras.Sequential([inner]), xla=False).names == ("attention",)


def test_a_keras_that_does_not_tell_when_it_trains_has_no_such_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Keras that does not say whether it trains gets no such kernel, so that the record names none that is unused."""
    import keras

    from hpcdl.step import keras_internals
    from hpcdl.step.kernels.table import use_fast_kernels

    monkeypatch.setattr(keras_internals, "_CALL", "kept_elsewhere")
    found = use_fast_kernels(keras.Sequential([keras.layers.Activation("gelu"), keras.layers.LayerNormalization()]))
    assert found.names == ("layer normalization",)
    problem = f"cannot see in Keras {keras.__version__} whether a layer trains"
    assert found.warnings == (f"gelu: the fast kernel {problem}; Keras's is used",)


def test_an_activation_of_any_length_is_not_compiled_for_each() -> None:
    import tensorflow as tf

    from hpcdl.step.kernels.table import TABLE

    kernels = [kernel for kernel in TABLE if kernel.name in {"gelu", "silu", "hard silu"}]
    for shape, expected in (((None, 5), True), ((3, 4, 5), True), ((3, None, 5), False), (None, False)):

        @tf.function(input_signature=[tf.TensorSpec(shape)])
        def traced(values: Any, expected: bool = expected) -> None:
            assert [kernel.chosen(values) is not None for kernel in kernels] == [expected] * 3

        traced.get_concrete_function()


def test_a_kernel_that_differs_is_left_out_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    from hpcdl.step.kernels import table

    wrong = [
        dataclasses.replace(kernel, chosen=lambda x, approximate=True: lambda: x * 1.001)
        if kernel.name == "gelu"
        else kernel
        for kernel in table.TABLE
    ]
    monkeypatch.setattr(table, "TABLE", tuple(wrong))
    found = table.use_fast_kernels()
    assert "gelu" not in found.names and "batch normalization" in found.names
    assert len(found.warnings) == 1 and found.warnings[0].startswith("gelu: the fast kernel differs from Keras's by")
    assert float(keras.activations.gelu(keras.ops.convert_to_tensor([10.0]))[0]) == 10.0
    monkeypatch.undo()


def test_a_kernel_whose_gradient_alone_is_no_number_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    from hpcdl.step.kernels import table

    @tf.custom_gradient
    def spoilt(x: Any) -> Any:
        return tf.nn.silu(x), lambda upstream: upstream * float("nan")

    changed = [
        dataclasses.replace(kernel, chosen=lambda x: lambda: spoilt(x)) if kernel.name == "silu" else kernel
        for kernel in table.TABLE
    ]
    monkeypatch.setattr(table, "TABLE", tuple(changed))
    found = table.use_fast_kernels()
    assert "silu" not in found.names
    assert found.warnings == ("silu: the fast kernel differs from Keras's by nan; Keras's is used",)
    monkeypatch.undo()


def test_a_kernel_that_fails_or_has_no_place_is_left_out_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras
    import tensorflow as tf

    from hpcdl.step.kernels import table

    def missing(layer: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        raise tf.errors.UnimplementedError(None, None, "no such kernel\nhere")

    changed = [
        dataclasses.replace(kernel, chosen=missing) if kernel.name == "batch normalization" else kernel
        for kernel in table.TABLE
    ]
    monkeypatch.setattr(table, "TABLE", tuple(changed))
    monkeypatch.delattr("keras.src.backend.tensorflow.nn.gelu")
    found = table.use_fast_kernels()
    assert "layer normalization" in found.names and not {"batch normalization", "gelu"} & {*found.names}
    assert found.warnings == (
        "batch normalization: the fast kernel fails (no such kernel); Keras's is used",
        f"gelu: no fast kernel for Keras {keras.__version__}",
    )
    monkeypatch.undo()


def test_all_can_be_taken_back_and_taken_twice() -> None:
    import keras

    from hpcdl.step.kernels.table import use_fast_kernels

    first = keras.layers.BatchNormalization.call
    use_fast_kernels()
    once = use_fast_kernels()
    assert keras.layers.BatchNormalization.call is not first and once.names
    assert use_fast_kernels(on=False).names == ()
    assert keras.layers.BatchNormalization.call is first


def test_trying_them_leaves_the_names_and_seeds_of_a_model_alone() -> None:
    import keras

    from hpcdl.step.kernels.table import use_fast_kernels

    def names_and_weights(*, fast: bool) -> tuple[list[str], bytes]:
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        use_fast_kernels(on=fast)
        model = made("resnet")
        return [layer.name for layer in model.layers], b"".join(
            variable.numpy().tobytes() for variable in model.weights
        )

    assert names_and_weights(fast=True) == names_and_weights(fast=False)


def test_the_record_names_only_kernels_that_a_layer_has_called() -> None:
    import keras
    import tensorflow as tf

    from hpcdl.step.kernels.table import names_used, use_fast_kernels

    class Own(keras.layers.Layer):
        def call(self, values: Any) -> Any:
            return 2 * values

    model = keras.Sequential([keras.Input((4,)), keras.layers.LayerNormalization(), Own()])
    assert "batch normalization" in use_fast_kernels(model).names and names_used() == ()
    model(tf.ones((2, 4)), training=True)
    assert names_used() == ("layer normalization",)
    use_fast_kernels(on=False)
    assert names_used() == ()
