"""Runs on two ranks: callbacks that evaluate, predict or fit in the middle of an epoch do not change the fit."""

import hpcdl

hpcdl.init(60)
import keras
import numpy as np

RANK = hpcdl.rank()
generator = np.random.default_rng(RANK)
x, y = generator.normal(size=(48, 4)).astype("float32"), generator.normal(size=(48, 1)).astype("float32")


class Inside(keras.callbacks.Callback):
    """Call `look` after the third step of each epoch and, with `at_end`, at the end of each epoch."""

    def __init__(self, look, on_ranks=(0, 1), at_end=False):
        super().__init__()
        self.look, self.on_ranks, self.at_end, self.seen = look, on_ranks, at_end, []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and RANK in self.on_ranks:
            self.seen.append(self.look(self.model))

    def on_epoch_end(self, epoch, logs=None):
        if self.at_end and RANK in self.on_ranks:
            self.seen.append(self.look(self.model))


def network():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(optimizer=hpcdl.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse", metrics=["mae"])
    return model


def fit(*callbacks, network=network):
    model = network()
    data = {"validation_data": (x[:8], y[:8]), "batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=list(callbacks), **data).history, model.get_weights()


def second_fit(model):
    other = network()
    return other.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"]


def own_second_fit(model):
    before = model.get_weights()
    model.fit(x[:8], y[:8], batch_size=8, verbose=0, shuffle=False)
    model.set_weights(before)


LOOKS = {
    "evaluate": Inside(lambda model: model.evaluate(x, y, verbose=0)),
    "evaluate at the end too": Inside(lambda model: model.evaluate(x, y, verbose=0), at_end=True),
    "evaluate on rank 0": Inside(lambda model: model.evaluate(x, y, verbose=0), on_ranks=(0,)),
    "predict on rank 0": Inside(lambda model: model.predict(x, verbose=0).sum(), on_ranks=(0,)),
    "a second fit": Inside(second_fit),
    "a second fit of the model itself": Inside(own_second_fit),
}
plain, weights = fit()
for name, callback in LOOKS.items():
    history, ended = fit(callback)
    same = history == plain and all(np.array_equal(*pair) for pair in zip(ended, weights, strict=True))
    print(f"CASE {RANK} {name}: {'as without' if same else (history, plain)}", flush=True)

# With hpcdl's callbacks the evaluation is over the ranks: the mean over all samples.
over = Inside(lambda model: model.evaluate(x, y, verbose=0, callbacks=[hpcdl.callbacks()]))
history, ended = fit(over)
rows = hpcdl.allgather_object([over.seen, history == {**history, "loss": plain["loss"]}])
print(f"CASE {RANK} evaluate over the ranks: {'as without' if rows[0] == rows[1] and rows[0][1] else rows}", flush=True)
hpcdl.shutdown()
