"""The networks by name, with their sizes: static, so that listing them loads no Keras.

A builder, `build(num_classes, input_shape)`, returns a Keras model that takes float images (N,H,W,C) scaled to [0, 1]
and gives float32 logits (N, num_classes), without a softmax; a network with auxiliary heads gives a list of them, the
main one first. The tests compare every number here with what is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcdl.core.errors import UsageError
from hpcdl.core.registry import Entry, Registry

FLOP_PER_CORE_AND_SECOND = 50e9
"""Single precision, in training: between a many-core and a server core; a guess, and told as one."""
FLOP_PER_MAC = 6
"""A multiply and an add, forward and twice backward."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A network at its default input and number of classes.

    `parameters` are the trainable ones; `moving_statistics` those that batch normalisation keeps beside them; `macs`
    the multiply-accumulates of convolutions and dense layers, forward, per image. `smallest_size` is the least height
    and width that the network takes. A network with several outputs has a weight for the loss of each.
    """

    name: str
    target: str
    summary: str
    parameters: int
    moving_statistics: int = 0
    macs: int
    input_shape: tuple[int, int, int]
    classes: int
    smallest_size: int = 1
    loss_weights: tuple[float, ...] = (1.0,)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in float32, which is what synchronous strategies average at each step."""
        return 4 * self.parameters


_LIST = (
    ModelInfo(
        name="lenet",
        target="hpcdl.models.lenet:build",
        summary="LeNet as Caffe trains it on MNIST: two convolutions, two dense layers",
        parameters=431_080,
        macs=2_293_000,
        input_shape=(28, 28, 1),
        classes=10,
        smallest_size=16,
    ),
    ModelInfo(
        name="cifar10-quick",
        target="hpcdl.models.cifar10_quick:build",
        summary="Caffe's quick ConvNet for CIFAR-10: three convolutions, two dense layers",
        parameters=145_578,
        macs=12_354_176,
        input_shape=(32, 32, 3),
        classes=10,
    ),
    ModelInfo(
        name="cifar10-full",
        target="hpcdl.models.cifar10_full:build",
        summary="Caffe's full ConvNet for CIFAR-10: the same with response normalisation",
        parameters=89_578,
        macs=12_298_240,
        input_shape=(32, 32, 3),
        classes=10,
    ),
    ModelInfo(
        name="alexnet",
        target="hpcdl.models.alexnet:build",
        summary="AlexNet in one tower, ungrouped: few operations per parameter",
        parameters=62_378_344,
        macs=1_135_256_096,
        input_shape=(227, 227, 3),
        classes=1000,
        smallest_size=67,
    ),
    ModelInfo(
        name="caffenet",
        target="hpcdl.models.caffenet:build",
        summary="CaffeNet: AlexNet with two groups, pooling before normalisation",
        parameters=60_965_224,
        macs=724_406_816,
        input_shape=(227, 227, 3),
        classes=1000,
        smallest_size=67,
    ),
    ModelInfo(
        name="googlenet",
        target="hpcdl.models.googlenet:build",
        summary="GoogLeNet (Inception v1), main output only",
        parameters=6_998_552,
        macs=1_582_671_872,
        input_shape=(224, 224, 3),
        classes=1000,
    ),
    ModelInfo(
        name="googlenet-aux",
        target="hpcdl.models.googlenet:build_with_auxiliary_heads",
        summary="GoogLeNet with its two auxiliary heads: three outputs, losses weighted 1, 0.3, 0.3",
        parameters=13_378_280,
        macs=1_591_044_096,
        input_shape=(224, 224, 3),
        classes=1000,
        smallest_size=65,
        loss_weights=(1.0, 0.3, 0.3),
    ),
    ModelInfo(
        name="resnet50",
        target="hpcdl.models.resnet50:build",
        summary="ResNet-50 v1: many operations per parameter",
        parameters=25_557_032,
        moving_statistics=53_120,
        macs=3_857_973_248,
        input_shape=(224, 224, 3),
        classes=1000,
    ),
    ModelInfo(
        name="vgg19",
        target="hpcdl.models.vgg19:build",
        summary="VGG-19: the most parameters, 411 MB of them in one tensor",
        parameters=143_667_240,
        macs=19_632_062_464,
        input_shape=(224, 224, 3),
        classes=1000,
        smallest_size=32,
    ),
    ModelInfo(
        name="hepcnn",
        target="hpcdl.models.hepcnn:build",
        summary="HEP-CNN, signal or background in calorimeter images: scales most easily",
        parameters=594_178,
        macs=2_630_025_472,
        input_shape=(224, 224, 3),
        classes=2,
        smallest_size=16,
    ),
)

MODELS: Mapping[str, ModelInfo] = {info.name: info for info in _LIST}
REGISTRY = Registry("model", {info.name: Entry(target=info.target, summary=info.summary) for info in _LIST})


def model_info(name: str) -> ModelInfo:
    """What the table says of `name`; UnknownNameError lists the known names."""
    REGISTRY.entry(name)
    return MODELS[name]


def network_for(input_shape: Sequence[int]) -> str:
    """The first network of the table that takes images of `input_shape` (H, W, C)."""
    return next(name for name, info in MODELS.items() if info.smallest_size <= min(input_shape[:2]))


def check_input(name: str, num_classes: int, input_shape: Sequence[int]) -> None:
    """Raise UsageError unless network `name` can be built for `num_classes` and `input_shape` (H, W, C)."""
    info = model_info(name)
    if num_classes < 1:
        raise UsageError(f"{name} cannot have {num_classes} classes; give 1 or more, by default {info.classes}")
    if len(input_shape) != 3 or any(extent < 1 for extent in input_shape):
        default = _shape_text(info.input_shape)
        raise UsageError(
            f"{name} cannot take samples of {_shape_text(input_shape)}; it takes HxWxC, by default {default}"
        )
    if min(input_shape[:2]) < info.smallest_size:
        smallest = f"{info.smallest_size}x{info.smallest_size}"
        raise UsageError(
            f"{name} cannot take images of {_shape_text(input_shape[:2])}; the smallest it takes is {smallest}: "
            f"choose another model, or shard with --image-size {info.smallest_size}"
        )


def _shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "no shape"
