"""What pipelines of tf.data on two ranks tell: parts of different orders, and one file in which both cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.dataset import _check_alike, _tell_batched_twice, _tell_left_out
from hpcdl.scripts.fit import pipelines

NUMBERS = np.arange(96.0).reshape(48, 2)
WHOLE = tf.data.Dataset.from_tensor_slices(NUMBERS)


class Group:
    """A group whose ranks say what `rows` holds, and without them what this one says."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows, self.own, self.messages = rows, [], self

    def allgather_json(self, own: Any) -> list[Any]:
        self.own = own
        return self.rows or [own]


def said(data_of: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what two ranks are told of their data: a warning, a refusal or nothing."""
    texts: list[str] = []
    monkeypatch.setattr(pipelines, "warn_once", lambda group, key, text: texts.append(text))
    groups = [Group([]), Group([])]
    for rank, group in enumerate(groups):
        pipelines.check_pipelines(group, [data_of(rank), None])  # type: ignore[arg-type]
    try:
        pipelines.check_pipelines(Group([group.own for group in groups]), [])  # type: ignore[arg-type]
    except UsageError as error:
        texts.append(str(error))
    return " ".join(texts)


def names(rank: int, *, seed: int | None = None) -> tf.data.Dataset:
    order = np.random.default_rng(rank if seed is None else seed).permutation(48)
    return tf.data.Dataset.from_tensor_slices([f"/data/{one}.png" for one in order])


@pytest.mark.parametrize(
    ("data_of", "warned"),
    [
        (lambda rank: WHOLE.shuffle(48).shard(2, rank).batch(8), True),
        (lambda rank: WHOLE.shuffle(48, seed=rank + 1).batch(8).shard(2, rank), True),
        (lambda rank: names(rank).shard(2, rank).map(tf.strings.length), True),
        (lambda rank: WHOLE.shuffle(48, seed=1).shard(2, rank).batch(8), False),
        (lambda rank: WHOLE.shard(2, rank).shuffle(48).batch(8), False),
        (lambda rank: names(rank, seed=1).shard(2, rank).shuffle(48), False),
        (lambda rank: WHOLE.shuffle(48).shard(5, 0), False),  # a fold, which all take
        (lambda rank: names(rank).shard(1, 0), False),  # one rank of each node
        (lambda rank: WHOLE.shuffle(48).batch(8), False),
        (lambda rank: NUMBERS[rank::2], False),
    ],
)
def test_parts_of_different_orders_are_found(
    data_of: Callable[[int], Any], warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert said(data_of, monkeypatch).startswith("shard() takes each rank's part from another order") == warned
    if not warned:
        assert not said(data_of, monkeypatch)


@pytest.mark.parametrize(
    ("data_of", "refused"),
    [
        (lambda rank: WHOLE.shard(2, rank).cache("all").shuffle(48).batch(8), True),
        (lambda rank: tf.data.Dataset.from_tensor_slices(NUMBERS[rank::2]).cache("all").batch(8), True),
        (lambda rank: WHOLE.batch(8).cache("all").shard(2, rank), False),
        (lambda rank: WHOLE.shard(2, rank).cache(f"of-{rank}").batch(8), False),
        (lambda rank: WHOLE.shard(2, rank).cache().batch(8), False),
    ],
)
def test_one_file_for_the_caches_of_several_ranks_is_refused(
    data_of: Callable[[int], Any], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = said(data_of, monkeypatch)
    assert text.startswith("ranks 0 and 1 cache different samples in one file, all: ") == refused
    assert ('write cache(f"all-{hpcdl.rank()}-of-{hpcdl.size()}")' in text) == refused


@pytest.mark.parametrize(
    ("data_of", "refused"),
    [
        (lambda rank: WHOLE.shard(2, rank).batch(8), "rank 0 takes shard(2, 0) of its data set, rank 1 shard(2, 1); "),
        (lambda rank: WHOLE.skip(24 * rank).take(24), "rank 1 take(24), skip(24); "),
        (lambda rank: WHOLE.take(24) if rank else WHOLE, "rank 0 takes all of its data set, rank 1 take(24); "),
        (lambda rank: tf.data.Dataset.range(rank * 48, rank * 48 + 48), "rank 1 range(48, 96); "),
        (lambda rank: WHOLE.skip(8).take(32).shard(3, 0).repeat(2).prefetch(rank + 1), ""),
    ],
)
def test_parts_that_ranks_have_taken_themselves_are_not_divided_again(
    data_of: Callable[[int], Any], refused: str
) -> None:
    class Two(Group):
        size = 2

        def agree(self, what: str) -> None:
            """Nothing to compare."""

    groups = [Two([]), Two([])]
    for rank, group in enumerate(groups):
        _check_alike(data_of(rank), group)  # type: ignore[arg-type]
    text = ""
    try:
        _check_alike(data_of(0), Two([group.own for group in groups]))  # type: ignore[arg-type]
    except UsageError as error:
        text = str(error)
    assert (f"{refused}it divides what all ranks have alike" in text) if refused else not text


def whole_of(number: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(number)


@pytest.mark.parametrize(
    ("whole", "num_taken", "text"),
    [
        (whole_of(320).batch(64), 4, "leaves out 64 of 320 samples"),
        (whole_of(260).batch(64).map(lambda row: row).prefetch(1), 4, ""),  # the last batch is small
        (whole_of(30).batch(10).repeat(3), 8, "leaves out 1 of 9 batches"),
        (whole_of(90).batch(10).repeat(3), 26, ""),
        (whole_of(100), 64, "leaves out 36 of 100 samples"),
        (whole_of(100), 96, ""),
    ],
)
def test_a_data_set_of_which_a_tenth_is_left_out_is_told(
    whole: Any, num_taken: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [""]
    monkeypatch.setattr("hpcdl.scripts.dataset.warn_once", lambda group, key, text: texts.append(text))
    batched = whole.element_spec.shape.rank > 0
    _tell_left_out(whole, num_taken, batched=batched, group=Group([]))  # type: ignore[arg-type]
    assert text in texts[-1] and bool(texts[-1]) == bool(text)


def made_of(*shapes: tuple[int, ...]) -> tf.data.Dataset:
    arrays = tuple(np.zeros((32, *shape), "float32") for shape in shapes)
    return tf.data.Dataset.from_tensor_slices(arrays[0] if len(arrays) == 1 else arrays)


@pytest.mark.parametrize(
    ("whole", "told"),
    [
        (made_of((3,), ()).batch(8), True),
        (made_of((3,), ()).shuffle(32, seed=1).batch(8).map(lambda x, y: (x * 2, y)).prefetch(1), True),
        (made_of((4, 4, 1)).batch(8).cache(), True),
        (made_of((3,), ()), False),
        (made_of((3,), ()).batch(8).unbatch(), False),
        (made_of(()).batch(8, drop_remainder=True).map(lambda text: (text[:-1], text[1:])), False),  # series
    ],
)
def test_batches_that_would_be_batched_again_are_told(whole: Any, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr("hpcdl.scripts.dataset.warn_once", lambda group, key, text: texts.append(text))
    _tell_batched_twice(whole, 4, Group([]))  # type: ignore[arg-type]
    assert ["makes batches of 4 batches: its elements are batches of 8 samples" in text for text in texts] == [
        True
    ] * told
