"""Whether ranks hold the same samples: what their sketches say, whatever order and size the samples have."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from hpcdl.core.errors import UsageError
from hpcdl.scripts.fit import pipelines, samples
from hpcdl.scripts.fit.samples import (
    SamplesOfEpoch,
    SamplesOfLoop,
    _held_by,
    _sketch,
    _sources_of,
    long_epochs,
    note_samples,
    stop_noting,
    verdict,
)
from hpcdl.scripts.fit.scaling import scaling_of
from hpcdl.scripts.process.group import ScriptGroup

SAME, SOME, NOTHING = "every rank was given the same", "some samples were given to several ranks", ""


def said(parts: list[np.ndarray]) -> str:
    return verdict([_sketch([part]) or [] for part in parts])


def rows(number: int, repeats: int = 1) -> np.ndarray:
    return np.repeat(np.random.default_rng(3).normal(size=(number, 5)).astype("float32"), repeats, axis=0)


@pytest.mark.parametrize("size", [2, 3, 16])
@pytest.mark.parametrize("number", [64, 20_000])
def test_parts_of_one_order_or_of_several(size: int, number: int) -> None:
    whole = rows(number)
    orders = [np.random.default_rng(rank).permutation(number) for rank in range(size)]
    text = said([whole[order] for order in orders])
    assert text.startswith(f"{SAME} {number} samples") and "set_random_seed(1 + hpcdl.rank())" in text
    assert said([whole[orders[0]][rank::size] for rank in range(size)]) == NOTHING
    mixed = [whole[order][rank::size] for rank, order in enumerate(orders)]
    assert said(mixed).startswith(SOME)


def test_a_few_common_or_many_repeated_samples_are_no_mistake() -> None:
    whole = rows(1000)
    assert said([whole[:503], whole[497:]]) == NOTHING  # parts of one length overlap at their ends
    table = rows(50, 40)
    assert said([table[0::2][:999], table[1::2]]) == NOTHING


def test_large_samples_are_compared_by_some_of_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdl.scripts.fit.samples._LOOKED_AT_BYTES", 2**12)
    whole = rows(3000)
    assert said([whole, whole[::-1]]).startswith(SAME)
    assert said([whole[0::2], whole[1::2]]) == NOTHING


@pytest.mark.parametrize("part", [np.zeros((8, 3)), np.zeros((0, 3))])
def test_samples_that_are_all_the_same_are_not_compared(part: np.ndarray) -> None:
    assert _sketch([part]) is None


def test_samples_of_few_values_that_are_shared_by_chance_are_no_mistake() -> None:
    """One repeat within 64 draws: so many of another rank's 64 are the same by chance."""
    whole = rows(200)
    assert said([whole[:64], whole[57:121]]).startswith(SOME)
    first = np.concatenate([whole[:63], whole[:1]])
    assert said([first, whole[57:121]]) == NOTHING


@pytest.mark.parametrize(
    ("own", "other", "text"),
    [
        (range(64), range(63, -1, -1), f"{SAME} 64 samples"),
        (range(64), range(40, 104), SOME),
        (range(64), range(64, 128), NOTHING),
        ([*range(32)] * 2, [*range(32)] * 2, NOTHING),  # positions, which are the same in every step
    ],
)
def test_a_custom_loop_is_compared_from_its_second_update(own: range, other: range, text: str) -> None:
    whole, said, notes, others = rows(128), list[str](), SamplesOfLoop(), SamplesOfLoop()
    for half in (slice(0, 32), slice(32, 64)):
        notes.note(whole[list(own)[half]])
        others.note(whole[list(other)[half]])

    class Two:
        messages = property(lambda self: self)

        def allgather_json(self, own: object) -> list[object]:
            return [own, others.sketch()]

        def keep(self, key: str, make: Callable[[], object]) -> None:
            """There is no data set that the loop iterates over."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcdl.scripts.fit.samples.warn_once", lambda group, key, warning: said.append(warning))
        for number in (1, 2, 4):
            notes.compare_after(number, Two())  # type: ignore[arg-type]
    assert len(said) == bool(text) and all(one.startswith(text) for one in said)


def test_the_order_of_several_inputs_counts() -> None:
    left, right = rows(64), np.roll(rows(64), 1, axis=0)
    assert verdict([_sketch([left, right]), _sketch([right, left])]) == NOTHING  # type: ignore[list-item]


@pytest.mark.parametrize(("number", "batch"), [(64, 10), (2000, 333)])
def test_what_arrives_in_batches_is_compared_as_arrays_are(number: int, batch: int) -> None:
    whole = rows(number)
    look = SamplesOfEpoch()
    order = np.random.default_rng(5).permutation(number)
    for start in range(0, number, batch):
        look.note(whole[order][start : start + batch])
    assert look.sketch() == _sketch([whole])


def test_tensors_without_a_row_for_each_sample_are_not_compared() -> None:
    look = SamplesOfEpoch()
    look.note(rows(8), np.arange(9))  # the values and the row ends of a ragged tensor
    assert look.sketch() is None


def test_samples_are_noted_for_the_model_of_the_fit_and_until_it_stops() -> None:
    """Another model's fit in the middle is not noted, nor a later fit after an error ended the first epoch."""
    model, other, whole = object(), object(), rows(64)
    notes = samples._notes[id(model)] = SamplesOfEpoch()

    @tf.function
    def step(batch: tf.Tensor) -> tf.Tensor:
        note_samples(model, lambda: [batch])
        note_samples(other, lambda: pytest.fail("no fit of this model compares samples"))
        return batch

    step(whole)
    assert notes.sketch() == _sketch([whole])
    stop_noting(model)
    step(whole)
    assert notes.sketch() == _sketch([whole]) and id(model) not in samples._notes


class OneOfTwo:
    """A communicator of two ranks whose other rank always sends what `other` returns."""

    def __init__(self, other: Callable[[], np.ndarray]) -> None:
        self.rank, self.size, self.other = 0, 2, other

    def duplicate(self) -> OneOfTwo:
        return self

    def allreduce(self, array: np.ndarray) -> None:
        array += self.other()

    def allgather_json(self, own: object) -> list[object]:
        return [own, own]


def test_two_threads_that_exchange_at_once_are_named() -> None:
    """The numbers of both threads' collectives are added up, and no rank's calls differ."""
    group = ScriptGroup(OneOfTwo(lambda: np.ones(4)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="two threads of a rank exchange at once, one in the start of a fit: let one"):
        group.agree("the start of a fit")


def test_a_second_thread_in_a_collective_is_refused_at_once() -> None:
    found: list[str] = []

    def other() -> np.ndarray:
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()
        return np.zeros(4)

    def meanwhile() -> None:
        try:
            group.agree("a barrier")
        except UsageError as error:
            found.append(str(error))

    group = ScriptGroup(OneOfTwo(other))  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        group.agree("the start of a fit")
    assert len(found) == 1 and "two threads of a rank exchange at once, one in a barrier" in found[0]


def standard(part: np.ndarray, axis: int | tuple[int, ...] | None = 0) -> np.ndarray:
    return (part - part.mean(axis, keepdims=True)) / part.std(axis, keepdims=True)


def ranged(part: np.ndarray, axis: int | tuple[int, ...] | None = 0, low: int = 0) -> np.ndarray:
    least, most = part.min(axis, keepdims=True), part.max(axis, keepdims=True)
    return low + (1 - low) * (part - least) / (most - least)


TABLE = np.random.default_rng(3).normal(3, 2, (400, 5)).astype("float32")
IMAGES = np.random.default_rng(3).random((40, 6, 6, 3)).astype("float32")


@pytest.mark.parametrize(
    ("parts", "warned"),
    [
        ([standard(TABLE[rank::2]) for rank in range(2)], True),
        ([standard(TABLE[rank::2, 0]) for rank in range(2)], True),
        ([standard(IMAGES[rank::2], None) for rank in range(2)], True),
        ([standard(IMAGES[rank::2], (0, 1, 2)) for rank in range(2)], True),
        ([standard(TABLE[0::2]), TABLE[1::2]], False),
        ([standard(TABLE)[rank::2] for rank in range(2)], False),
        (
            [standard(TABLE)[order] for order in (slice(None), slice(None, None, -1))],
            False,
        ),  # they are the same samples
        ([standard(IMAGES[rank::2], (1, 2, 3)) for rank in range(2)], False),  # each picture by itself
        ([standard(TABLE[rank::2], 1) for rank in range(2)], False),
        ([ranged(TABLE[rank::2]) for rank in range(2)], True),
        ([ranged(TABLE[rank::2], low=-1) for rank in range(2)], True),
        ([ranged(TABLE[rank::2, 1]) for rank in range(2)], True),
        ([ranged(IMAGES[rank::2], (0, 1, 2)) for rank in range(2)], True),
        ([ranged(IMAGES, (0, 1, 2))[rank::2] for rank in range(2)], False),
        ([ranged(np.random.default_rng(3).random((400, 40)))[rank::2] for rank in range(2)], False),
        ([ranged(TABLE[rank::2], 1) for rank in range(2)], False),  # each sample by itself
        ([ranged(np.round(TABLE[rank::2])) for rank in range(2)], False),  # such as counts
        ([ranged(IMAGES)[rank::2] for rank in range(2)], False),
        ([np.random.default_rng(rank).random((400, 40, 40, 1)).astype("float32") for rank in range(2)], False),
        ([1 - 2 * np.random.default_rng(rank).random((400, 40, 40)) for rank in range(2)], False),
        ([ranged(np.random.default_rng(rank).random((400, 40, 40, 1)), (0, 1, 2)) for rank in range(2)], True),
        ([(np.round(IMAGES[rank::2] * 255) / 255) for rank in range(2)], False),
        ([np.sort(TABLE[rank::2]).clip(0, 1) for rank in range(2)], False),
        ([np.random.default_rng(rank).integers(0, 2, (32, 3)) * 1.0 for rank in range(2)], False),
        ([np.where(np.arange(64).reshape(32, 2) % 2, 1.0, -1.0) * sign for sign in (1, -1)], False),
    ],
)
def test_parts_that_each_rank_has_scaled_are_named(parts: list[np.ndarray], warned: bool) -> None:
    said: list[str] = []

    class Two:
        messages = property(lambda self: self)
        kept: ClassVar[dict[str, Any]] = {}

        def keep(self, key: str, make: Callable[[], Any]) -> Any:
            return self.kept.setdefault(key, make())

        def allgather_json(self, own: Any) -> list[Any]:
            return [own, own if isinstance(own, bool) else [_sketch(parts[1:]), False, scaling_of(parts[1:])]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcdl.scripts.fit.samples.warn_once", lambda group, key, warning: said.append(warning))
        samples.warn_of_same_samples(Two(), object(), parts[0])  # type: ignore[arg-type]
    assert any("rank standardised its own" in text or "rank scaled its own" in text for text in said) == warned


@pytest.mark.parametrize(
    ("parts", "warned"),
    [
        ([standard(TABLE[rank::2]) for rank in range(2)], True),
        ([standard(IMAGES[rank::2], (0, 1, 2)) for rank in range(2)], True),
        ([standard(TABLE)[rank::2] for rank in range(2)], False),
        ([standard(TABLE[0::2]), TABLE[1::2]], False),
        ([standard(TABLE[rank::2], 1) for rank in range(2)], False),  # each sample by itself
        ([np.where(np.arange(64).reshape(32, 2) % 2, 1.0, -1.0) * sign for sign in (1, -1)], False),
    ],
)
def test_batches_that_each_rank_has_standardised_are_named(parts: list[np.ndarray], warned: bool) -> None:
    notes = [SamplesOfEpoch(), SamplesOfEpoch()]
    for note, part in zip(notes, parts, strict=True):
        for at in range(0, len(part), 7):
            note.note(np.ones((len(part[at : at + 7]), 1)), part[at : at + 7])
    said: list[str] = []

    class Two:
        messages = property(lambda self: self)
        size = 2
        rows: ClassVar[list[Any]] = []

        def allgather_json(self, own: Any) -> list[Any]:
            self.rows.append(own)
            return self.rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcdl.scripts.fit.samples.warn_once", lambda group, key, warning: said.append(warning))
        notes[0].compare(Two())  # type: ignore[arg-type]
        said.clear()
        notes[1].compare(Two())  # type: ignore[arg-type]
    assert any("rank standardised its own" in text for text in said) == warned


def drawn(kind: str, rank: int, whole: np.ndarray) -> np.ndarray:
    """Return the samples of an epoch whose number of steps the script says."""
    generator = np.random.default_rng(rank)
    part = whole[rank::2]
    return {
        "all": generator.permutation(whole),
        "half of all": generator.permutation(whole)[: len(part)],
        "any of all": generator.choice(whole, len(whole)),
        "part": generator.permutation(part),
        "part twice": np.concatenate([generator.permutation(part), generator.permutation(part)]),
        "part twice without the last batch": np.concatenate([part, part])[:-7],
        "part four times": np.concatenate([part] * 4),
        "any of part": generator.choice(part, len(whole)),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("all", SAME),
        ("part twice", "steps_per_epoch takes each sample of a rank's part 2 times"),
        ("part twice without the last batch", "steps_per_epoch takes each sample of a rank's part 2 times"),
        ("half of all", NOTHING),
        ("any of all", NOTHING),
        ("part", NOTHING),
        ("part four times", NOTHING),
        ("any of part", NOTHING),
    ],
)
@pytest.mark.parametrize("number", [64, 5000])
def test_steps_of_one_process_are_found_in_what_an_epoch_takes(number: int, kind: str, text: str) -> None:
    notes = [SamplesOfEpoch(counts_steps=True), SamplesOfEpoch(counts_steps=True)]
    for rank, note in enumerate(notes):
        mine = drawn(kind, rank, rows(number))
        for at in range(0, len(mine), 8):
            note.note(mine[at : at + 8])
    said: list[str] = []

    class Two:
        messages = property(lambda self: self)
        size = 2
        rows: ClassVar[list[Any]] = []

        def allgather_json(self, own: Any) -> list[Any]:
            return [*self.rows, own] if self.rows else self.rows.append(own) or [own]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpcdl.scripts.fit.samples.warn_once", lambda group, key, warning: said.append(warning))
        notes[0].compare(Two())  # type: ignore[arg-type]
        said.clear()
        notes[1].compare(Two())  # type: ignore[arg-type]
    assert [one[: len(text)] for one in said] == ([text] if text else [])


def numbers() -> Iterator[float]:
    yield from map(float, np.random.default_rng().permutation(64))


@pytest.mark.parametrize(
    ("whole", "noted"),
    [
        (tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec(())), True),
        (tf.data.Dataset.range(64), False),  # its stages tell enough
    ],
)
def test_samples_of_a_generator_that_ranks_divide_are_compared_after_an_epoch(whole: Any, noted: bool) -> None:
    class Two:
        messages = property(lambda self: self)

        def keep(self, key: str, make: Callable[[], Any]) -> Any:
            return make()

        def allgather_json(self, own: Any) -> list[Any]:
            return [own, own]

    part = whole.shard(2, 0).batch(8)
    assert (samples.warn_of_same_samples(Two(), object(), part) is not None) == noted  # type: ignore[arg-type]


def files(names: list[str], *, labels: bool = True) -> tf.data.Dataset:
    """Return files that are read and changed at random, as image_dataset_from_directory gives them."""
    of = tf.data.Dataset.from_tensor_slices
    data = tf.data.Dataset.zip((of(names), of(np.arange(len(names)) % 2))) if labels else of(names)
    return data.shuffle(99).map(lambda *row: tf.random.uniform([3])).batch(8).prefetch(1)


def pictures(array: np.ndarray) -> Any:
    generator = tf.keras.preprocessing.image.ImageDataGenerator(horizontal_flip=True)
    return generator.flow(array, np.arange(len(array)) % 2, batch_size=8)


NAMES = [f"data/{number}.png" for number in range(64)]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([files(NAMES), files(NAMES)], f"{SAME} 64 samples"),
        ([files(NAMES), files(NAMES).concatenate(files(NAMES))], NOTHING),  # such stages are not known
        ([files(NAMES[:40]), files(NAMES[24:])], SOME),
        ([files(NAMES[0::2]), files(NAMES[1::2])], NOTHING),
        ([files(NAMES, labels=False)] * 2, NOTHING),  # a file may have many samples
        ([files(NAMES).shard(2, rank) for rank in range(2)], NOTHING),
        ([files(NAMES).skip(rank).take(4) for rank in range(2)], NOTHING),
        ([pictures(np.resize(rows(64), (64, 4, 4, 3)))] * 2, f"{SAME} 64 samples"),
        ([pictures(np.random.default_rng(rank).random((64, 4, 4, 3))) for rank in range(2)], NOTHING),
    ],
)
def test_files_and_pictures_that_change_at_random_are_compared_by_what_they_come_from(
    parts: list[Any], text: str
) -> None:
    sketches = [_sketch(_sources_of(part)) for part in parts]
    said = "" if None in sketches else verdict(sketches)  # type: ignore[arg-type]
    assert said.startswith(text) and bool(said) == bool(text)


@pytest.mark.parametrize(
    ("data", "rows_of_step", "warned"),
    [
        (files(NAMES), 8, True),
        (files(NAMES), 16, True),  # a batch and its second view
        (files(NAMES), 4, False),  # a rank's part of each batch
        (files(NAMES).repeat(), 8, False),  # as many steps as the script likes
        (files(NAMES).unbatch(), 8, False),
    ],
)
def test_a_loop_of_each_rank_over_a_whole_that_changes_at_random_is_named(
    monkeypatch: pytest.MonkeyPatch, data: tf.data.Dataset, rows_of_step: int, warned: bool
) -> None:
    said: list[str] = []

    class Two:
        messages, size = property(lambda self: self), 2

        def allgather_json(self, own: Any) -> list[Any]:
            return [own, own]

        def keep(self, key: str, make: Callable[[], object]) -> None:
            make()

    monkeypatch.setattr(samples, "warn_once", lambda group, key, warning: said.append(warning))
    monkeypatch.setattr(pipelines, "_iterated", weakref.WeakKeyDictionary())
    monkeypatch.setattr(tf.data.Dataset, "__iter__", tf.data.Dataset.__iter__)
    pipelines.note_iterated()
    for number in (8, rows_of_step):  # the first loop is over, as that of a validation
        notes = SamplesOfLoop()
        for batch in data.take(3):
            assert len(pipelines.under_way()) == 1 and batch is not None
        for _ in data:
            notes.note(np.random.default_rng(number).random((number, 3)))
            break
    assert pipelines.under_way() == []
    iterator = iter(data)
    assert next(iterator) is not None
    notes.compare_after(1, Two())  # type: ignore[arg-type]
    assert [text.startswith(f"{SAME} 64 samples") for text in said] == [True] * warned


class Held(keras.utils.PyDataset):
    """A data set of a script's own class, which changes samples at random."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        vars(self).update(held, batch_size=8, order=np.random.default_rng().permutation(len(next(iter(held.values())))))


@pytest.mark.parametrize(
    ("parts", "num_taken", "text"),
    [
        ([Held(x=rows(64), y=np.arange(64) % 2)] * 2, 64, f"{SAME} 64 samples"),
        ([Held(paths=NAMES), Held(paths=NAMES[::-1])], 56, f"{SAME} 64 samples"),  # without a remainder
        ([Held(paths=NAMES[:40]), Held(paths=NAMES[24:])], 40, SOME),
        ([Held(x=rows(64))] * 2, 32, NOTHING),  # it takes the rank's part itself
        ([Held(paths=NAMES[rank::2]) for rank in range(2)], 32, NOTHING),
        ([Held(files=[np.ones(2)] * 64)] * 2, 64, NOTHING),
        ([rows(64)] * 2, 64, NOTHING),
    ],
)
def test_a_data_set_of_which_each_rank_takes_all_is_named(parts: list[Any], num_taken: int, text: str) -> None:
    sketches = [_sketch(_held_by(part, num_taken)) for part in parts]
    said = "" if None in sketches else verdict(sketches)  # type: ignore[arg-type]
    assert said.startswith(text) and bool(said) == bool(text)


def shares(of: str) -> tf.data.Dataset:
    """Return a rank's share of 100 samples on 2 ranks, repeated for ever."""
    whole = tf.data.Dataset.range(100)
    return {
        "batches": lambda: whole.shard(2, 0).shuffle(10).batch(8).repeat().prefetch(1),
        "samples": lambda: whole.shard(2, 0).repeat().batch(8, num_parallel_calls=2),
        "known": lambda: whole.batch(8).shard(2, 0).map(lambda row: row).repeat(),
        "whole": lambda: whole.batch(8).repeat(),
        "once": lambda: whole.shard(2, 0).batch(8),
        "slice": lambda: tf.data.Dataset.from_tensor_slices(np.arange(100)[0::2]).shuffle(50).batch(8).repeat(),
        "filtered": lambda: whole.shard(2, 0).filter(lambda row: row > 3).batch(8).repeat(),
    }[of]()


@pytest.mark.parametrize(
    ("of", "steps", "warned"),
    [("batches", 12, True), ("samples", 13, True), ("known", 13, True), ("batches", 6, False), ("samples", 7, False),
     ("slice", 13, True), ("slice", 7, False),
     ("batches", 20, False), ("whole", 12, False), ("once", 12, False), ("filtered", 12, False),
     ("batches", None, False)],
)  # fmt: skip
def test_steps_of_one_process_for_a_rank_s_part_are_found(of: str, steps: int | None, warned: bool) -> None:
    assert long_epochs(shares(of), steps, 2).startswith("steps_per_epoch=") == warned
    assert not long_epochs(shares(of), steps, 1)
