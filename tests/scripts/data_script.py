"""Runs on two ranks: shuffled data sets, and layers that learn from data before a fit."""

import hpcdl

hpcdl.init(60)
import keras
import numpy as np
import tensorflow as tf

from hpcdl.core.errors import UsageError

RANK = hpcdl.rank()
whole = tf.data.Dataset.range(96)


def taken(data, epochs=2):
    """Return how often each sample was taken over all ranks, and whether the epochs had different orders."""
    mine = [[int(one) for batch in data for one in np.ravel(batch)] for _ in range(epochs)]
    rows = hpcdl.allgather_object(mine)
    alike = [sorted(one for row in rows for one in row[epoch]) == list(range(96)) for epoch in range(epochs)]
    return all(alike), mine[0] != mine[1]


def refusal(call):
    try:
        call()
    except UsageError as error:
        return str(error)
    return "nobody noticed"


assert taken(hpcdl.dataset(whole.shuffle(96), batch_size=8)) == (True, True), "a common seed"
assert taken(hpcdl.dataset(whole.shuffle(96, reshuffle_each_iteration=False), batch_size=8)) == (True, False)
assert taken(hpcdl.dataset(whole.shuffle(96, seed=3).batch(8))) == (True, True), "a seed of the script's"
for other in (np.random.default_rng(RANK).permutation(96), np.arange(96) + RANK, np.arange(96 + 2 * RANK)):
    for kind in (other, [f"file {one}" for one in other]):
        unlike = tf.data.Dataset.from_tensor_slices(kind).map(lambda one: one)
        assert "other data than rank 0" in refusal(lambda: hpcdl.dataset(unlike, batch_size=8))  # noqa: B023
assert taken(hpcdl.dataset(whole, batch_size=8)) == (True, False)
assert "different orders" in refusal(lambda: hpcdl.dataset(whole.shuffle(96).batch(8)))
assert taken(hpcdl.dataset(whole.shuffle(96, seed=1 + RANK), batch_size=8)) == (True, True), "other seeds on ranks"

values = np.random.default_rng(1).normal(3, 2, (101, 3)).astype("float32")
parts = [values[:61], values[61:]]
L = keras.layers
for data in (parts[RANK], tf.data.Dataset.from_tensor_slices(parts[RANK]).batch(16)):
    layer, other = L.Normalization(), L.Normalization()
    hpcdl.adapt(layer, data)
    other.adapt(values)
    assert np.allclose(layer(values), other(values), atol=1e-4)

texts = ["the cat sat", "a cat and a dog", "the end", "dog eat dog", "größer als die Katze"]
mine = texts[:3] if RANK == 0 else texts[3:]
for make, all_, own in (
    (lambda: L.TextVectorization(), texts, mine),
    (lambda: L.TextVectorization(), texts, tf.data.Dataset.from_tensor_slices(mine).batch(2)),
    (lambda: L.StringLookup(), np.array(texts), np.array(mine)),
    (lambda: L.IntegerLookup(), np.array([5, 5, 7, 9, 9, 9]), np.array([[5, 7], [9, 9, 9, 5]][RANK])),
):
    layer, other = make(), make()
    hpcdl.adapt(layer, own)
    other.adapt(all_)
    assert layer.get_vocabulary() == other.get_vocabulary(), (layer.get_vocabulary(), other.get_vocabulary())
layer = L.Discretization(num_bins=4)
hpcdl.adapt(layer, parts[RANK][:, :1])
assert len({repr(row) for row in hpcdl.allgather_object([float(one) for one in layer.bin_boundaries])}) == 1

alone = L.Normalization(name="scale")
alone.adapt(parts[RANK])
model = keras.Sequential([keras.Input((3,)), alone, L.Dense(1)])
model.compile(optimizer=hpcdl.DistributedOptimizer("sgd"), loss="mse")
text = refusal(lambda: model.fit(values[:8], np.ones((8, 1)), verbose=0))
assert "layer scale was adapted to other data" in text and "hpcdl.adapt(layer, data)" in text, text
hpcdl.adapt(alone, parts[RANK])
outside = L.StringLookup(name="outside")  # applied to data before it reaches a model
outside.adapt(np.array(mine))
restores = keras.callbacks.LambdaCallback(
    on_train_end=lambda logs: model.set_weights([2 * one for one in model.get_weights()])
)
model.fit(values[:8], np.ones((8, 1)), verbose=0, callbacks=[restores] if RANK == 0 else [])
sums = hpcdl.allgather_object(float(sum(abs(one.numpy()).sum() for one in model.trainable_weights)))
assert sums[0] == sums[1], "a callback of rank 0 has changed the weights at the end"
cached = tf.data.Dataset.from_tensor_slices((values[:8], np.ones((8, 1)))).shard(2, RANK).cache("cached").batch(2)
small = keras.Sequential([keras.Input((3,)), L.Dense(1)])
small.compile(optimizer=hpcdl.DistributedOptimizer("sgd"), loss="mse")
text = refusal(lambda: small.fit(cached, verbose=0))
assert "ranks 0 and 1 cache different samples" in text, text
print("as it should be", flush=True)
hpcdl.shutdown()
