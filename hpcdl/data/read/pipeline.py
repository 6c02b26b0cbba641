"""Turn numpy batches into TensorFlow batches, with augmentation; only this file of the package imports TensorFlow."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import tensorflow as tf

from hpcdl.core.errors import CorruptError, HpcdlError, UsageError, carried, originals
from hpcdl.data.format.dataset import Dataset, Split, open_dataset
from hpcdl.data.format.manifest import Field
from hpcdl.data.format.order import NO_SHIFT, Ids, Shift, mixed, pass_slice
from hpcdl.data.format.prefetch import BufferPool, Prefetched, aligned_empty
from hpcdl.data.read.reader import SplitReader, SyntheticReader, open_reader
from hpcdl.data.read.windows import TrainingStream, open_stream

Batches = Prefetched[tuple[Any, Any]]
_AHEAD = 2
_as_written = tf.autograph.experimental.do_not_convert
"""For functions on batches without tensor-dependent control flow: AutoGraph would parse all of it at each start."""
_TOGETHER_BYTES, _MOST_TOGETHER = 256 * 1024, 32
"""Small batches are read together, up to these limits: a Python call costs as much as reading one of them."""


class GraphBatches:
    """Batches of TensorFlow's `iterator` for a graph that reads it directly; `next` takes one outside of the graph."""

    def __init__(self, iterator: Iterator[Any], release: Callable[[], None]) -> None:
        self._held = [iterator]  # a list: the finalizer empties it, and drops the only reference
        self._finish = weakref.finalize(self, _let_go, self._held, release)

    @property
    def iterator(self) -> Any:
        """The iterator; pass it to a graph as an argument, because a captured one lives as long as the process."""
        return self._held[0]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, Any]:
        with originals():
            batch: tuple[Any, Any] = next(self._held[0])
            return batch

    def close(self) -> None:
        """Delete the iterator, then close its source."""
        self._finish()


def _let_go(held: list[Iterator[Any]], release: Callable[[], None]) -> None:
    held.clear()  # waits for TensorFlow's threads
    release()


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes, seeded by run, step and place in the global batch; the default changes nothing.

    `crop_padding` pixels are added on every side, and a window of the original size is cut out at random (He et al.
    2016, section 4.2). `min_area` above 0 cuts out a part of `min_area` to 1 of the image's area, with an aspect ratio
    of 3:4 to 4:3, and resizes it (Szegedy et al. 2015, section 6). `flip` mirrors half of the images left to right.
    `mean` and `std` (one number per channel, of pixels in [0, 1]) turn images to float32, (pixel - mean) / std.
    """

    crop_padding: int = 0
    min_area: float = 0.0
    flip: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.crop_padding < 0:
            raise UsageError(f"crop padding is {self.crop_padding}; it must be 0 or more pixels")
        if not 0 <= self.min_area <= 1:
            raise UsageError(f"the smallest part that is cut out is {self.min_area} of an image; it must be in 0 to 1")
        if self.crop_padding and self.min_area:
            raise UsageError("crop padding and random parts that are resized both cut a window out; give one of them")
        if (
            bool(self.mean) != bool(self.std)
            or len(self.mean) != len(self.std)
            or any(value <= 0 for value in self.std)
        ):
            raise UsageError("give mean and std together, one number per channel each, std above 0")

    @property
    def changes_nothing(self) -> bool:
        """Whether images stay unchanged."""
        return not (self.crop_padding or self.min_area or self.flip or self.mean)


_NO_CHANGE = Augmentation()


def training_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    worker: int = 0,
    num_workers: int = 1,
    seed: int = 0,
    start_step: int = 0,
    augment: Augmentation | None = None,
    deterministic: bool = True,
    global_batch: int | None = None,
    shift: Shift = NO_SHIFT,
    in_graph: bool = False,
) -> Batches | GraphBatches:
    """Return endless batches of one worker from `start_step` on: inputs and targets (see `hpcdl.data.open`).

    Samples and augmentation depend only on seed and step, not on the number of workers; `deterministic` sets tf.data's
    option of that name and changes neither. `global_batch`, if given, is divided as evenly as possible, in place of
    `batch_size` each. `in_graph` returns GraphBatches. Raises UsageError if the split has fewer samples than a global
    batch.
    """
    stream = open_stream(
        dataset, batch_size=batch_size, worker=worker, num_workers=num_workers, seed=seed, global_batch=global_batch,
        shift=shift,
    )  # fmt: skip

    def produce() -> Iterator[tuple[Any, Any]]:
        return iter(_dataset(dataset, stream, start_step, seed, augment or _NO_CHANGE, deterministic))

    if in_graph:
        return GraphBatches(produce(), stream.close)
    return Prefetched(produce, depth=_AHEAD, release=stream.close)


def evaluation_batches(
    dataset: Dataset,
    split: Split,
    *,
    batch_size: int,
    worker: int = 0,
    num_workers: int = 1,
    augment: Augmentation | None = None,
    firsts: Sequence[int] | None = None,
) -> Batches:
    """Return a worker's part of one pass over `split`: all workers together read every sample exactly once.

    The last batch is shorter. Only mean and std of `augment` are applied. `firsts`, if given, are the first samples of
    the batches to read, in rising order, in place of a worker's part; only a batch at the split's end is shorter.
    """
    reader = open_reader(dataset, split)
    own_samples = pass_slice(split.num_samples, worker, num_workers) if firsts is None else range(split.num_samples)
    # Held-out images stay as they are; mean and deviation are part of what the model was trained on.
    fixed = Augmentation(mean=augment.mean, std=augment.std) if augment and dataset.pictures else _NO_CHANGE

    def ids_from(start: int) -> Ids:
        return np.arange(start, min(start + batch_size, own_samples.stop), dtype=np.int64)

    def read_from(start: int) -> list[Any]:
        ids = ids_from(start)
        return [reader.read(field, ids) for field in dataset.fields]

    def produce() -> Iterator[tuple[Any, Any]]:
        if firsts is None:
            starts = tf.data.Dataset.range(own_samples.start, own_samples.stop, batch_size)
        else:
            starts = tf.data.Dataset.from_tensor_slices(np.array(firsts, np.int64))
        batches = _stored(_Samples(dataset, reader, read_from, ids_from), starts, batch_size, None)
        if not fixed.changes_nothing:
            batches = batches.map(
                _as_written(lambda images, labels: (_augmented(images, fixed, 0, _Rows(0, 0, 0)), labels))
            )
        batches = _preprocessed(batches, dataset, starts, 0, training=False)
        return iter(batches.with_options(_options(True)))

    return Prefetched(produce, depth=_AHEAD, release=reader.close)


def as_tf_dataset(
    data: str | Dataset,
    *,
    split: str | None = None,
    batch_size: int = 32,
    worker: int = 0,
    num_workers: int = 1,
    seed: int = 0,
    start_step: int = 0,
    epochs: int | None = None,
    augment: Augmentation | None = None,
    verify_data: bool = True,
) -> Any:
    """A `tf.data.Dataset` of shuffled batches (inputs, targets): the public API, `hpcdl.data.open`.

    Inputs and targets are each a single value, such as images (B, H, W, C) and their labels (B,), or a dict of several
    by name. Numbers are as stored, or scaled as the manifest says; classes are int64; text is int32, each byte plus 1,
    and 0 after the end; samples of varying length are padded with zeros.

    `split` defaults to the training split; `epochs=None` repeats for ever. `start_step` resumes. `verify_data` checks
    data against its checksums (if `data` is a Dataset, its own setting applies).
    """
    dataset = open_dataset(data, verified=verify_data) if isinstance(data, str) else data
    if split is not None and split not in dataset.splits:
        raise UsageError(f"{dataset.name} has no split {split!r}; known: {', '.join(dataset.splits)}")
    chosen = dataset.splits[split] if split else None
    stream = open_stream(
        dataset, batch_size=batch_size, worker=worker, num_workers=num_workers, seed=seed, split=chosen
    )
    batches = _dataset(dataset, stream, start_step, seed, augment or _NO_CHANGE, True)
    if epochs is None:
        return batches
    remaining = max(0, epochs * stream.steps_per_epoch - start_step)
    # Stated to TensorFlow: after unbatch or ignore_errors it does not know the number, which Keras shows.
    return batches.take(remaining).apply(tf.data.experimental.assert_cardinality(remaining))


def _dataset(
    dataset: Dataset,
    stream: TrainingStream,
    start_step: int,
    seed: int,
    augment: Augmentation,
    deterministic: bool,
) -> Any:
    # Without an end: epochs follow one another, and the loop decides when to stop.
    steps = tf.data.Dataset.range(start_step, np.iinfo(np.int64).max)
    size = stream.share.batch_size
    changes = dataset.pictures and not augment.changes_nothing
    samples = _Samples(dataset, stream.reader, stream.batch, stream.ids)
    together = min(_TOGETHER_BYTES // _num_bytes(dataset, size), _MOST_TOGETHER)
    # Augmentation and preprocessing take a seed for each step, so their batches come one by one.
    if together > 1 and not changes and dataset.preprocess is None and not dataset.keeps_bytes:
        return _read_together(samples, steps, together, size).with_options(_options(deterministic))
    batches = _stored(samples, steps, size, size)
    if changes:
        rows = _Rows(mixed(seed, 7) >> 1, stream.rows.start, stream.global_batch)  # 63 bits: the key becomes an int64
        batches = tf.data.Dataset.zip(steps, batches).map(
            _as_written(lambda step, batch: (_augmented(batch[0], augment, step, rows), batch[1]))
        )
    batches = _preprocessed(batches, dataset, steps, mixed(seed, 11, stream.worker) >> 1, training=True)
    return batches.with_options(_options(deterministic)).prefetch(_AHEAD)


def _num_bytes(dataset: Dataset, num_samples: int) -> int:
    """Return the bytes of `num_samples` samples; `_TOGETHER_BYTES`, which disables joint reads, if lengths vary."""
    if any(field.ragged for field in dataset.fields):
        return _TOGETHER_BYTES
    return num_samples * sum(field.longest_bytes for field in dataset.fields)


def _read_together(samples: _Samples, steps: Any, num_batches: int, batch_size: int) -> Any:
    """Return the batches of `steps`, read `num_batches` at a time by one Python call, with prefetching."""
    lead = (num_batches, batch_size)
    pools = [BufferPool((*lead, *field.shape), field.dtype) for field in samples.dataset.fields]

    def read(numbers: Ids) -> list[Any]:
        buffers = [pool.take() for pool in pools]
        for batch_number, number in enumerate(numbers.tolist()):
            for buffer, values in zip(buffers, samples.read(number), strict=True):
                buffer[batch_number] = values
        return buffers

    # Nothing is dropped from endless steps; the remainder's shape would not be static.
    batches = _batches(samples.dataset, read, steps.batch(num_batches, drop_remainder=True), lead)
    return batches.prefetch(1).unbatch()


def _preprocessed(batches: Any, dataset: Dataset, numbers: Any, key: int, *, training: bool) -> Any:
    """Apply the user's own function to `batches`, with a seed of two numbers: `key` and the batch's."""
    apply = dataset.preprocess

    def one(number: Any, batch: Any) -> Any:
        assert apply is not None
        return apply(*batch, training=training, seed=tf.stack([tf.constant(key, tf.int64), number]))

    if apply is not None:
        batches = tf.data.Dataset.zip(numbers, batches).map(_as_written(one))
    if dataset.scale == "0..1":
        return batches
    return batches.map(_as_written(lambda inputs, targets: (_unscaled(inputs, dataset), targets)))


def _unscaled(inputs: Any, dataset: Dataset) -> Any:
    """Return the inputs, with uint8 values that the step must not scale as float32."""

    def one(value: Any) -> Any:
        to_convert = value.dtype == tf.uint8 and not dataset.scales(value.shape[1:].as_list())
        return tf.cast(value, tf.float32) if to_convert else value

    return tf.nest.map_structure(one, inputs)


def batch_spec(dataset: Dataset) -> tuple[Any, Any]:
    """Return the model's inputs and targets, each a TensorSpec or a dict of several; the batch dimension is None."""

    def nothing(_: int) -> Any:
        raise AssertionError("only the kinds of the batches are asked for")

    numbers = tf.data.Dataset.range(0)
    batches = _batches(dataset, nothing, numbers, (None,))  # decoded images have the same type as arrays of pixels
    inputs, targets = _preprocessed(batches, dataset, numbers, 0, training=True).element_spec
    return inputs, targets


def _options(deterministic: bool) -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = deterministic
    # The autotune thread sleeps for up to a minute, may miss the deletion of an iterator, and so delay it.
    options.autotune.enabled = False
    return options


@dataclass(frozen=True)
class _Samples:
    """How to read the elements of a dataset of steps: `read` returns the fields, `ids` the numbers of the samples."""

    dataset: Dataset
    reader: SplitReader | SyntheticReader
    read: Callable[[int], Sequence[Any]]
    ids: Callable[[int], Ids]


def _stored(samples: _Samples, steps: Any, batch_size: int, length: int | None) -> Any:
    """Return batches (inputs, targets) of `steps`, with images decoded; `length` is None if it may vary."""
    dataset = samples.dataset
    if dataset.encoded:
        return _decoded(dataset, _Files(samples), steps, batch_size, length)

    def read(step: Any) -> list[Any]:
        return [_dense(value, field) for value, field in zip(samples.read(int(step)), dataset.fields, strict=True)]

    return _batches(dataset, read, steps, (length,))


class _Files:
    """The encoded images of each element of a dataset of steps."""

    def __init__(self, samples: _Samples) -> None:
        self._samples = samples
        self._failed: list[Exception] = []

    def read(self, step: int, batch_size: int) -> tuple[Any, Any, Any]:
        """Return files, labels and rows of a step, followed by an empty file whose row is -1 minus their number.

        If they cannot be read, return enough empty files to fill a batch; `refuse` then raises the reason.
        """
        try:
            files, labels = self._samples.read(step)
        except Exception as error:  # noqa: BLE001  an error raised here would be dropped, like a damaged image
            self._failed.append(error)
            count = batch_size + 1
            return np.array([b""] * count, object), np.zeros(count, np.int64), np.full(count, -1)
        # -1 minus, not minus: a step without files must not look like row 0.
        rows = np.append(np.arange(len(files)), -1 - len(files))
        return np.array([*files, b""], object), np.append(labels, 0), rows

    def refuse(self, steps: Any, decode: Callable[[Any], Any]) -> Any:
        """Raise the reason why images of `steps` are missing: CorruptError with shard and sample of the first."""
        if self._failed:
            # The first, from which others may follow.
            raise self._failed[0]
        reader, images = self._samples.reader, self._samples.dataset.inputs[0]
        assert isinstance(reader, SplitReader)
        # A dropped image shifts the rows behind it: a batch may hold rows of two steps.
        for sample in np.concatenate([self._samples.ids(step) for step in np.unique(steps).tolist()]).tolist():
            try:
                decode(tf.constant(reader.read(images, np.array([sample]))[0]))
            except tf.errors.OpError as error:
                # Without the names of graph nodes that TensorFlow puts around its reason.
                name, why = reader.describe(sample), (error.message or "").partition(" [")[0].rpartition("}} ")[2]
                raise CorruptError(
                    f"{name} is damaged: its picture does not decode ({why}); "
                    "`hpcdl inspect DIR --verify` names all such samples"
                ) from error
        raise HpcdlError("a picture could not be decoded a moment ago, and now it can; is memory short? Try again")


def _decoded(dataset: Dataset, files: _Files, steps: Any, batch_size: int, length: int | None) -> Any:
    """Return batches (images, labels) of encoded images, decoded one by one, in parallel, by TensorFlow.

    A graph cannot catch what an operation raises, and TensorFlow's messages name no sample. So an image that does not
    decode is dropped, and its absence detected: the rows of a batch count up from 0, and end with the empty file that
    ends each step. The row of that file says how many came before it. It is never dropped, so a batch ends after
    `batch_size` + 1 steps at most, however many images are damaged.
    """
    decode = _decoder(dataset)
    # The file that ends each step has no pixels, and tf.cond needs both sides of one type.
    nothing = tf.zeros(dataset.sample_shape, tf.as_dtype(dataset.dtype))

    def read(step: Any) -> Any:
        return files.read(int(step), batch_size)

    def load(step: Any) -> Any:
        kinds = [tf.string, tf.int64, tf.int64]
        content, labels, rows = tf.numpy_function(carried(read), [step], kinds)
        for tensor in (content, labels, rows):
            tensor.set_shape((None,))
        return content, labels, rows, tf.fill(tf.shape(rows), step)

    def one(content: Any, label: Any, row: Any, step: Any) -> Any:
        return tf.cond(row < 0, lambda: nothing, lambda: decode(content)), label, row, step

    def whole(images: Any, labels: Any, rows: Any, of_steps: Any) -> Any:
        size = tf.size(rows, tf.int64)
        complete_rows = tf.concat([tf.range(size - 1), [-size]], 0)

        def refuse(numbers: Any) -> Any:
            return files.refuse(numbers, decode)

        labels = tf.cond(
            tf.reduce_all(rows == complete_rows),
            lambda: labels[:-1],
            lambda: tf.numpy_function(carried(refuse), [of_steps], tf.int64),
        )
        labels.set_shape((length,))
        return images[:-1], labels

    # Those that this rank is bound to, not all of the node.
    cpus = len(os.sched_getaffinity(0))
    samples = steps.map(_as_written(load)).unbatch()
    # In order whatever --deterministic says: a gap in the rows is what tells of a dropped image.
    samples = samples.map(_as_written(one), num_parallel_calls=cpus, deterministic=True).ignore_errors()
    return samples.batch(batch_size + 1, drop_remainder=length is not None).map(_as_written(whole))


def _dense(value: Any, field: Field) -> Any:
    """Return a field's batch as one array: samples of varying length padded with zeros, text as numbers from 1."""
    if not field.variable:
        return value
    shift = 1 if field.kind == "text" else 0
    padded = aligned_empty((len(value), *field.shape), np.int32 if shift else field.dtype)
    padded[...] = 0
    for row, sample in zip(padded, value, strict=True):
        row[: len(sample)] = sample
        row[: len(sample)] += shift
    return padded


def _batches(dataset: Dataset, read: Callable[[Any], Any], steps: Any, lead: tuple[int | None, ...]) -> Any:
    """Return batches (inputs, targets) of the fields that `read` returns for each element of `steps`, without a copy.

    `lead` are the dimensions before a sample's own; None if a dimension may vary.
    """
    fields = dataset.fields
    kinds = [tf.int32 if field.kind == "text" else tf.as_dtype(field.dtype) for field in fields]

    def load(step: Any) -> tuple[Any, Any]:
        tensors = tf.numpy_function(carried(read), [step], kinds)
        for value, field in zip(tensors, fields, strict=True):
            # numpy_function loses shapes, which Keras needs to build a model.
            value.set_shape((*lead, *field.shape))
        values = {field.name: _scaled(value, field) for value, field in zip(tensors, fields, strict=True)}
        return _structured(values, dataset.inputs), _structured(values, dataset.targets)

    return steps.map(_as_written(load))


def _structured(values: Mapping[str, Any], fields: Sequence[Field]) -> Any:
    """Return the single value of `fields`, or a dict of several by name."""
    return values[fields[0].name] if len(fields) == 1 else {field.name: values[field.name] for field in fields}


def _scaled(value: Any, field: Field) -> Any:
    """Scale a field's batch as the manifest says; in float64 if float32 would round the stored numbers."""
    statistics = field.statistics
    if statistics is None or field.normalise == "none":
        return value
    low, spread = (statistics.mean, np.array(statistics.std)) if field.normalise == "mean-std" else (
        statistics.low, np.array(statistics.high) - np.array(statistics.low)
    )  # fmt: skip
    # A constant field has no spread, and numpy's `where` computes both sides.
    scale = np.where(spread > 0, 1 / np.where(spread > 0, spread, 1), 1)
    exact = np.float32 if np.can_cast(field.dtype, np.float32) else np.float64
    scaled = (tf.cast(value, exact) - tf.constant(np.array(low, exact))) * tf.constant(scale.astype(exact))
    return tf.cast(scaled, tf.float32)


def _decoder(dataset: Dataset) -> Callable[[Any], Any]:
    """Return a graph function from a JPEG or PNG file to an image of the data set's shape."""
    height, width, channels = dataset.sample_shape

    def decode(content: Any) -> Any:
        # With animations the number of axes would depend on the file.
        image = tf.io.decode_image(content, channels=channels, expand_animations=False)
        size = tf.shape(image)[:2]

        def covering() -> Any:
            return tf.cast(tf.round(_covering(image, size, (height, width))), image.dtype)

        fits = tf.reduce_all(size == (height, width))
        image = tf.cast(tf.cond(fits, lambda: image, covering), tf.as_dtype(dataset.dtype))
        image.set_shape((height, width, channels))
        return image

    return decode


def _covering(image: Any, image_size: Any, size: tuple[int, int]) -> Any:
    """Scale `image` of size `image_size` to cover `size` and cut it at the centre, as for raw shards."""
    scale = tf.reduce_max(tf.constant(size, tf.float32) / tf.cast(image_size, tf.float32))
    left_over = scale * tf.cast(image_size, tf.float32) - tf.constant(size, tf.float32)
    return tf.raw_ops.ScaleAndTranslate(
        images=image[tf.newaxis],
        size=tf.constant(size),
        scale=tf.stack([scale, scale]),
        translation=-left_over / 2,
        kernel_type="triangle",
        antialias=True,
    )[0]


class _Rows(NamedTuple):
    """This worker's rows of a step's random numbers: row i of its batch is number `first` + i of `total`."""

    key: int
    first: int
    total: int


def _augmented(images: Any, augment: Augmentation, step: Any, rows: _Rows) -> Any:
    """Apply the changes of `augment` to `images`; they depend only on key, step and place in the global batch."""
    shape = tf.shape(images)
    count, height, width = shape[0], shape[1], shape[2]

    def drawn(number: int, columns: int) -> Any:
        # Two draws a step, neither with the seed of another draw.
        seed = tf.stack([tf.constant(rows.key, tf.int64), 2 * step + number])
        # For the whole global batch, so that a sample's changes do not depend on the number of workers.
        numbers = tf.random.stateless_uniform((rows.total, columns), seed=seed)
        return numbers[rows.first : rows.first + count]

    if augment.flip:
        images = tf.where(drawn(0, 1)[:, :, None, None] < 0.5, images[:, :, ::-1], images)
    if augment.crop_padding:
        pad = augment.crop_padding
        # Drawn numbers are below 1: shifts are 0 to 2 pad.
        shift = tf.cast(drawn(1, 2) * (2 * pad + 1), tf.int32)
        padded = tf.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
        padded = tf.gather(padded, shift[:, :1] + tf.range(height), axis=1, batch_dims=1)
        images = tf.gather(padded, shift[:, 1:] + tf.range(width), axis=2, batch_dims=1)
    if augment.min_area:
        # The same draw as for padding: the two exclude each other.
        images = _random_parts(images, augment.min_area, drawn(1, 4))
    if augment.mean:
        # Mean and std are given for pixels in 0..1, whatever their type.
        scale = 255.0 if images.dtype == tf.uint8 else 1.0
        images = (tf.cast(images, tf.float32) / scale - tf.constant(augment.mean)) / tf.constant(augment.std)
    return images


_WIDEST = 4 / 3


def _random_parts(images: Any, min_area: float, drawn: Any) -> Any:
    """Cut a part out of each image and resize it to the image's size (bilinear).

    `drawn` (B, 4) determines area, aspect ratio and position. Parts are limited to the image's width and height.
    """
    height, width = images.shape[1], images.shape[2]
    area = height * width * (min_area + (1 - min_area) * drawn[:, 0])
    # Uniform in the logarithm, so that wide and tall parts are equally likely.
    ratio = tf.exp((2 * drawn[:, 1] - 1) * float(np.log(_WIDEST)))
    part_width = tf.clip_by_value(tf.round(tf.sqrt(area * ratio)), 1, width)
    part_height = tf.clip_by_value(tf.round(tf.sqrt(area / ratio)), 1, height)
    left = tf.floor(drawn[:, 2] * (width - part_width + 1))
    top = tf.floor(drawn[:, 3] * (height - part_height + 1))
    # Corners are pixel centers, as fractions of the distance between the first and the last.
    rows, columns = max(height - 1, 1), max(width - 1, 1)
    boxes = tf.stack(
        [top / rows, left / columns, (top + part_height - 1) / rows, (left + part_width - 1) / columns], axis=1
    )
    kind = images.dtype
    numbers = images if kind in (tf.uint8, tf.float32, tf.float64) else tf.cast(images, tf.float32)
    parts = tf.image.crop_and_resize(numbers, boxes, tf.range(tf.shape(images)[0]), (height, width))
    return parts if kind == tf.float32 else tf.cast(parts if kind.is_floating else tf.round(parts), kind)
