"""Runs on two ranks: variables that no gradient changes, and accumulated gradients, in a fit."""

import hpcdl

hpcdl.init(120)
import keras
import numpy as np

from hpcdl.core.errors import HpcdlError, UsageError

RANK, SIZE = hpcdl.rank(), hpcdl.size()
LARGE = 2**60 + 1


class Kept(keras.layers.Layer):
    """Count batches in a variable for each way of combination, and keep the rank's number in three more variables."""

    def build(self, shape):
        def number(name, dtype="int64", start=LARGE):
            return self.add_weight(
                shape=(), dtype=dtype, trainable=False, name=name, initializer=keras.initializers.Constant(0)
            )

        self.kinds = {name: number(name) for name in ("usual", "own", "sum", "rank_0")}
        self.mean, self.queue = number("mean", "float32"), number("queue", "float32")
        self.moving_number = number("moving_number", "float32")

    def call(self, x):
        for one in self.kinds.values():
            one.assign_add(1 + RANK)
        for one in (self.mean, self.queue, self.moving_number):
            one.assign(float(RANK))
        return x


def network(optimizer):
    keras.utils.set_random_seed(RANK)
    kept = Kept()
    kept.build((None, 3))
    for one in kept.kinds.values():
        one.assign(LARGE)
    model = keras.Sequential([keras.Input((3,)), kept, keras.layers.Dense(1)])
    model.compile(optimizer=hpcdl.DistributedOptimizer(optimizer), loss="mse")
    return kept, model


x, y = np.random.default_rng(RANK).normal(size=(40, 3)), np.ones((40, 1))
kept, model = network(keras.optimizers.SGD(0.01))
for how in ("own", "sum"):
    hpcdl.combine(kept.kinds[how], how)
hpcdl.combine(kept.kinds["rank_0"], "rank 0")
hpcdl.combine(kept.mean, "mean")
for fits in (1, 2):
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)  # 10 steps, that count 10 and 20
    taken = 10 * fits
    mine = {name: int(one.numpy()) - LARGE for name, one in kept.kinds.items()}
    expected = {"usual": taken * (1 + RANK), "own": taken * (1 + RANK), "sum": taken * 3, "rank_0": taken}
    assert mine == expected, (mine, expected)
    values = [float(one.numpy()) for one in (kept.mean, kept.queue, kept.moving_number)]
    assert values == [0.5, float(RANK), 0.5], values

# Five steps an epoch, with gradients of two steps summed for each update, as in one process.
kept, model = network(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
start = model.get_weights()[-2:]
start = [hpcdl.broadcast_object(one.tolist()) for one in start]
model.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0)
model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
rows = hpcdl.allgather_object([x.tolist(), y.tolist()])
parts = [[np.array(one, "float32").reshape(5, 8, -1) for one in row] for row in rows]
whole = [np.concatenate([part[kind] for part in parts], 1).reshape(80, -1) for kind in (0, 1)]
plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
plain.set_weights([np.array(one, "float32") for one in start])
plain.compile(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), loss="mse")
plain.fit(*whole, batch_size=16, epochs=3, shuffle=False, verbose=0)
for mine, other in zip(model.get_weights()[-2:], plain.get_weights(), strict=True):
    assert np.abs(mine - other).max() < 1e-5, (mine, other)

kept, model = network(keras.optimizers.SGD(0.01))
hpcdl.combine(kept.queue, "same")
try:
    model.fit(x, y, batch_size=8, verbose=0)
    raise AssertionError("nobody noticed")
except HpcdlError as error:
    assert "queue" in str(error) and "differ over the ranks" in str(error), error
for wrong, text in ((("maximum",), "choose one of 'mean'"), (("mean",), "have no mean")):
    try:
        hpcdl.combine(kept.kinds["usual"], *wrong)
        raise AssertionError("nobody noticed")
    except UsageError as error:
        assert text in str(error), error
print("as it should be", flush=True)
hpcdl.shutdown()
