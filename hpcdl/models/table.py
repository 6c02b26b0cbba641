"""The networks by name, with their sizes, and the syntax of `--model`: static, so that neither loads Keras.

A builder, `build(num_classes, input_shape)`, returns a Keras model that takes float images (N,H,W,C) scaled to [0, 1]
and returns float32 logits (N, num_classes), without a softmax. A network with auxiliary heads returns a list of logits,
the main head's first. The tests compare every number here with the built networks.

A spec is a name of the table, `path/to/file.py:function`, `package.module:function`, or `emulated:NAME:SECONDS`.
Modules are found along sys.path, as by Python; the current folder is never added to it. Files are read at the path in
the spec.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpcdl.core.errors import UnknownNameError, UsageError
from hpcdl.core.registry import Entry, Registry
from hpcdl.core.storage.files import read_bytes
from hpcdl.core.units import parse_seconds

FLOP_PER_CORE_AND_SECOND = 50e9
"""Single precision, in training: between a many-core and a server core; a guess, and reported as such."""
FLOP_PER_MAC = 6
"""A multiply and an add; once forward and twice backward."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """A network at its default input and number of classes.

    `parameters` counts trainable parameters; `moving_statistics` those of batch normalisation in addition; `macs` the
    multiply-accumulates of convolutions and dense layers, forward, per image. `smallest_size` is the smallest height
    and width that the network accepts. `loss_weights` has a weight for the loss of each output.
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
        """Bytes of all gradients in float32, which synchronous strategies average at each step."""
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
    """Return the table's entry for `name`; UnknownNameError lists the known names."""
    REGISTRY.entry(name)
    return MODELS[name]


def network_for(input_shape: Sequence[int]) -> str:
    """Return the first network of the table that takes images of `input_shape` (H, W, C)."""
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


FORMS = "a name from `hpcdl models`, path/to/file.py:function, package.module:function or emulated:NAME:SECONDS"
EMULATED = "emulated:"
MOST_WAIT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A user's own function: in the file `path`, or in the importable `module`; `what` says what it is for."""

    path: Path | None = None
    module: str = ""
    function: str
    what: str = "model"

    @property
    def forms(self) -> str:
        """The accepted forms of its spec."""
        return FORMS if self.what == "model" else "path/to/file.py:function or package.module:function"

    def __str__(self) -> str:
        return f"{self.path or self.module}:{self.function}"


@dataclass(frozen=True, kw_only=True)
class Emulation:
    """The variables of the table's `network`, with a wait of `seconds` per step in place of its computing.

    `noise` is the standard deviation of the wait's logarithm.
    """

    network: str
    seconds: float
    noise: float = 0.0


def parse_emulation(spec: str) -> Emulation | None:
    """Parse `emulated:resnet50:0.7s` or `emulated:resnet50:0.7s:5%`; None for another spec."""
    if not spec.startswith(EMULATED):
        return None
    name, _, numbers = spec.removeprefix(EMULATED).partition(":")
    wait, _, noise = numbers.partition(":")
    if name not in MODELS:
        raise UnknownNameError("model to emulate", name, MODELS)
    try:
        result = Emulation(network=name, seconds=parse_seconds(wait), noise=float(noise.removesuffix("%") or 0) / 100)
    except ValueError:
        result = Emulation(network=name, seconds=math.nan)
    if not (0 < result.seconds <= MOST_WAIT_S and 0 <= result.noise <= 1):
        raise UsageError(
            f"model {spec!r} is not understood; give the network, its time for a step and how much that varies:"
            " emulated:resnet50:0.7s or emulated:resnet50:0.7s:5%"
        )
    return result


def parse_spec(spec: str) -> str | UserFunction:
    """Return a name of the table (for an emulation its network's), or the user's function; else raise UsageError."""
    if spec in MODELS:
        return spec
    if emulation := parse_emulation(spec):
        return emulation.network
    if ":" not in spec and not _names_file(spec):
        raise UnknownNameError("model", spec, MODELS)
    return parse_function(spec)


def parse_function(spec: str, what: str = "model") -> UserFunction:
    """Return the user's function that `spec` names, to be used as `what`; UsageError if it names none."""
    source, colon, function = spec.rpartition(":")
    blank = UserFunction(function="", what=what)
    if not colon and _names_file(spec):
        usual = "build" if what == "model" else what
        raise UsageError(f"{what} {spec!r} names a file but no function in it; write {spec}:{usual}")
    if not source or not function.isidentifier():
        raise UsageError(f"{what} {spec!r} is not understood; give {blank.forms}")
    if _names_file(source):
        return replace(blank, path=Path(source).expanduser(), function=function)
    if not all(part.isidentifier() for part in source.split(".")):
        raise UsageError(f"{what} {spec!r}: {source!r} is neither a .py file nor a module; give {blank.forms}")
    return replace(blank, module=source, function=function)


def _names_file(source: str) -> bool:
    return source.endswith(".py") or "/" in source


def model_name(spec: str) -> str:
    """Return a short name for records and folders: the table's, or the user's file (and function, unless `build`)."""
    builder = parse_spec(spec)
    if isinstance(builder, str):
        return builder if spec in MODELS else re.sub(r"[^\w.-]", "-", spec.removesuffix("%"))
    stem = builder.path.stem if builder.path else builder.module.rpartition(".")[2]
    name = stem if builder.function == "build" else f"{stem}-{builder.function}"
    return re.sub(r"[^\w.-]", "_", name)


def loss_weights(spec: str) -> tuple[float, ...] | None:
    """Return the loss weight of each output, main output first; None (equal weights) for a user's model."""
    builder = parse_spec(spec)
    return model_info(builder).loss_weights if isinstance(builder, str) else None


def check_model_spec(spec: str, *, classes: int | None = None, input_shape: Sequence[int] | None = None) -> None:
    """Raise UsageError for errors in `spec` that are visible without running it or importing Keras.

    Such errors are an unknown name, a missing file, module or function, and a syntax error; also a network that does
    not take `classes` or `input_shape` (H, W, C).
    """
    builder = parse_spec(spec)
    if isinstance(builder, str):
        info = model_info(builder)
        num_classes = info.classes if classes is None else classes
        check_input(builder, num_classes, info.input_shape if input_shape is None else input_shape)
        return
    check_function(builder)


def check_function(builder: UserFunction) -> None:
    """Raise UsageError for errors in a user's function that are visible without running its file."""
    source = existing_file(builder) if builder.path else _module_source(builder)
    if source is not None:
        _check_function(builder, source)


def existing_file(builder: UserFunction) -> Path:
    """Return the file of `builder`; UsageError if it does not exist."""
    path = builder.path
    if path is None or not path.is_file():
        raise UsageError(f"{builder.what} {str(builder)!r}: there is no file {str(path)!r}; give {builder.forms}")
    return path


def _module_source(builder: UserFunction) -> Path | None:
    """Return the source file of a module, found without importing its packages; None if it has none (compiled)."""
    top, *submodules = builder.module.split(".")
    module_spec: ModuleSpec | None = importlib.util.find_spec(top)
    for part in submodules:
        locations = module_spec.submodule_search_locations if module_spec else None
        # Look up only the last part of the name: for a full name the finder would import the packages.
        module_spec = PathFinder.find_spec(part, list(locations)) if locations is not None else None
    if module_spec is None:
        raise module_missing(builder)
    return Path(module_spec.origin) if module_spec.origin and module_spec.origin.endswith(".py") else None


def module_missing(builder: UserFunction) -> UsageError:
    """Return the error for a module that is not on sys.path."""
    return UsageError(
        f"{builder.what} {str(builder)!r}: Python finds no module {builder.module!r}; install its package, add its "
        f"folder to PYTHONPATH, or give path/to/file.py:{builder.function}"
    )


def function_missing(builder: UserFunction, known: Sequence[str]) -> UsageError:
    """Return the error for a function that the file or module does not have."""
    source = builder.path or builder.module
    if known:
        return UnknownNameError(f"{builder.what} function in {source}:", builder.function, known)
    return UsageError(
        f"unknown {builder.what} function in {source}: {builder.function!r}; it has no function outside classes; write "
        "this one there, or name another file"
    )


def _check_function(builder: UserFunction, source: Path) -> None:
    try:
        tree = ast.parse(read_bytes(source), str(source))
        names = _bound_names(tree.body)
    except SyntaxError as error:
        raise UsageError(
            f"{builder.what} {str(builder)!r}: syntax error in {source}:{error.lineno}: {error.msg}"
        ) from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply for the parser
        reason = str(error) or type(error).__name__
        raise UsageError(f"{builder.what} {str(builder)!r}: {source} is no Python source: {reason}") from error
    if builder.function not in names and "*" not in names and "__getattr__" not in names:
        raise function_missing(builder, _functions(tree.body))


def _functions(body: Sequence[ast.stmt]) -> list[str]:
    return [node.name for node in body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]


def _bound_names(body: Sequence[ast.stmt]) -> set[str]:
    """Return the names that the statements bind at module level; `*` if a star import may bind any name."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        else:
            names |= {inside.id for inside in ast.walk(node) if isinstance(inside, ast.Name) and _stored(inside)}
            inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
            names |= _bound_names(inner)
    return names


def _stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)
