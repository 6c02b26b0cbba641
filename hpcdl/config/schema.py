"""Every setting of `train`, `bench` and `tune-threads`, in groups; each package receives the groups that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcdl.config.forms import UNASKED
from hpcdl.config.settings import ALLOCATORS, AUTO, EXTENT, NOTHING, REPEAT, REQUIRED, RESULT, TIME, setting

CROSS_ENTROPY = "cross-entropy"
# Weight of the loss of each auxiliary head, after the main output (GoogLeNet, Szegedy et al. 2015, section 5).
AUXILIARY_WEIGHT = 0.3
ALLOW_GRPC = "Run grpc-* on nodes that other users can be on: their servers know no password."
# PyTorch's DistributedDataParallel has the same default (bucket_cap_mb).
BUCKET_BYTES = 25 * 1024**2
KEEP_BATCH, SCALE_RATE = "keep-batch", "scale-rate"


FAST_KERNELS = (
    "Compute layers by faster kernels than Keras's, alike to rounding; auto: those that pass a test at the start, "
    "on: all, or the run fails."
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained: the network and its computation."""

    model: str = setting(
        REQUIRED,
        "Network: a name of `hpcdl models`, your own as file.py:build or package.module:build, emulated:NAME:SECONDS.",
        matters=RESULT | TIME,
    )
    classes: int | None = setting(
        None, "Number of classes; by default as many as the data has.", at_least=1, matters=RESULT
    )
    init_weights: Path | None = setting(
        None, "Start from the weights of this .keras file (fine-tuning).", matters=RESULT
    )
    precision: str = setting(
        "float32",
        "Precision of the computation.",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        matters=RESULT | TIME,
    )
    fast_kernels: str = setting(AUTO, FAST_KERNELS, choices=(AUTO, "on", "off"), matters=RESULT | TIME)
    xla: bool = setting(
        False,
        "Compile the forward and backward pass by XLA, which pays on GPUs; the exchange then begins after both.",
        matters=RESULT | TIME,
    )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data."""

    data: str = setting(REQUIRED, "Folder made by `hpcdl shard`, or synthetic:NAME.", matters=RESULT | TIME)
    batch_size: int = setting(32, "Samples per worker and step.", at_least=1, matters=RESULT | TIME)
    keep_batch: int | None = setting(
        None,
        "Samples per step over all workers, however many those are; --batch-size is then the most computed at once.",
        at_least=1,
        matters=RESULT | TIME,
    )
    flip: bool = setting(False, "Mirror half of the training images left to right, by the seed.", matters=RESULT)
    crop_padding: int = setting(
        0, "Pixels added on every side before a window of the old size is cut out.", at_least=0, matters=RESULT
    )
    random_resized_crop: float = setting(
        0.0,
        "Smallest part of an image's area that is cut out at random and resized, such as 0.08; 0 cuts nothing out.",
        at_least=0,
        at_most=1,
        matters=RESULT,
    )
    preprocess: str = setting(
        "", "Your function of each batch, inputs and targets: file.py:function or package.module:function.",
        matters=RESULT | TIME,
    )  # fmt: skip
    scale: str = setting(
        "auto",
        "What becomes of an input's bytes (uint8): 0..1 divides by 255, none keeps them, auto does so by whether they "
        "are pictures.",
        choices=("auto", "0..1", "none"),
        matters=RESULT,
    )
    verify_data: bool = setting(True, "Verify shard checksums while reading.", matters=TIME)
    shuffle: str = setting(
        "global",
        "Shuffle over the whole data set, or over each node's share of it, which is then all that the node reads.",
        choices=("global", "local"),
        matters=RESULT | TIME,
    )
    stage: Path | None = setting(
        None, "Copy the shards to this node-local folder first; removed afterwards.", matters=TIME
    )


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss, the metrics and the target."""

    loss: str = setting(
        CROSS_ENTROPY, "Loss: cross-entropy, or a function of keras.losses for other models.", matters=RESULT
    )
    metrics: str = setting(
        "", "Metrics beside another loss: functions of keras.metrics, separated by commas.", matters=RESULT
    )
    # At 1 nothing of the label would be left.
    # Szegedy et al. 2016, section 7.
    label_smoothing: float = setting(
        0.0, "Share of a label spread over all classes.", at_least=0, at_most=0.999, matters=RESULT
    )
    target_accuracy: float | None = setting(
        None, "Stop when the held-out accuracy reaches this: 98%.", kind="accuracy", matters=EXTENT
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The rule and the rates that update the weights."""

    optimizer: str = setting(
        "sgd",
        "Rule that updates the weights.",
        choices=("sgd", "momentum", "nesterov", "adam", "lars"),
        matters=RESULT | TIME,
    )
    learning_rate: float = setting(0.01, "Learning rate.", above=0, matters=RESULT)
    # At 1 the velocity would never decay.
    momentum: float = setting(
        0.9, "Momentum of momentum, nesterov and lars.", at_least=0, at_most=0.9999, matters=RESULT
    )
    weight_decay: float = setting(
        0.0, "Weight decay; biases and normalisation are left out.", at_least=0, matters=RESULT
    )
    # You, Gitman and Ginsburg 2017, the coefficient eta.
    lars_trust: float = setting(0.001, "Trust coefficient of lars.", above=0, matters=RESULT)
    # The linear scaling rule, and the warm-up that it needs (Goyal et al. 2017, sections 2.1 and 2.2).
    base_batch: int | None = setting(
        None,
        "Global batch that the learning rate was chosen for; it is scaled linearly to this run's.",
        at_least=1,
        matters=RESULT,
    )
    warmup_epochs: float = setting(0.0, "Epochs of linear warm-up of the learning rate.", at_least=0, matters=RESULT)
    schedule: str = setting(
        "constant",
        "Learning rate after the warm-up.",
        choices=("constant", "step", "cosine", "polynomial"),
        matters=RESULT,
    )
    decay_epochs: float = setting(30.0, "Epochs between the drops of --schedule step.", above=0, matters=RESULT)
    decay_factor: float = setting(0.1, "Factor of each drop of --schedule step.", above=0, at_most=1, matters=RESULT)
    decay_power: float = setting(1.0, "Power of --schedule polynomial.", above=0, matters=RESULT)


@dataclass(frozen=True, kw_only=True)
class ExchangeConfig:
    """How ranks exchange gradients or weights."""

    strategy: str = setting("ring", "Parallel strategy: a name from `hpcdl strategies`.", matters=RESULT | TIME)
    bucket_size: int | str = setting(
        BUCKET_BYTES,
        "Gradients are sent together in buckets of about this size; auto measures some before the first step.",
        kind="amount",
        at_least=1,
        matters=RESULT | TIME,
    )
    servers: int = setting(
        1, "Ranks that serve (the highest), for strategies with servers.", at_least=1, matters=EXTENT
    )
    compress: str = setting(
        "none",
        "How gradients, or changes of weights, travel; int8, topk and powersgd keep the rest of gradients.",
        kind="compression",
        matters=RESULT | TIME,
    )
    accumulate: int = setting(
        1, "Batches whose gradients are added up before an exchange.", at_least=1, matters=RESULT | TIME
    )
    placement: str | None = setting(
        None,
        "How variables are placed on servers; by default split for ps, round-robin for grpc-ps.",
        choices=("round-robin", "greedy", "split"),
        matters=TIME,
    )
    # Chen et al. 2016, "Revisiting distributed synchronous SGD".
    backup_workers: int = setting(
        0, "Workers of ps whose gradients need not be waited for.", at_least=0, matters=RESULT | TIME
    )

    @property
    def bucket_bytes(self) -> int:
        """The size of buckets; if the run finds it by itself, the first size."""
        return BUCKET_BYTES if self.bucket_size == AUTO else int(self.bucket_size)


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Exchange of strategies whose workers keep weights of their own: the EASGD family, and periodic averaging."""

    elasticity: float | None = setting(
        None,
        "Elastic strength rho; the moving rate is learning rate x rho and follows its schedule.",
        above=0,
        matters=RESULT,
    )
    # beta = P alpha = 0.9 is the default of Zhang, Choromanska and LeCun 2015; SC17 gives none.
    moving_rate: float | None = setting(
        None, "Constant moving rate alpha in place of --elasticity; default 0.9 / workers.", at_least=0, matters=RESULT
    )
    period: int | str = setting(
        1,
        "Steps from one exchange to the next, or auto; default 1, local-sgd 8, slowmo 12, (streaming-)diloco 50.",
        kind="count",
        at_least=1,
        matters=RESULT | TIME,
    )
    period_within: int | None = setting(
        None,
        "Of local-sgd, slowmo and diloco: steps from one mean over a node's workers to the next, beside --period.",
        at_least=1,
        matters=RESULT | TIME,
    )
    period_between: int | None = setting(
        None,
        "Another name for --period beside --period-within: steps from one exchange of all workers to the next.",
        at_least=1,
        matters=RESULT | TIME,
    )
    # SlowMo: Wang et al. 2019 (arXiv 1910.00643); DiLoCo: Douillard et al. 2023 (arXiv 2311.08105).
    outer_rate: float | None = setting(
        None,
        "Rate at which an exchange of slowmo (default 1) or (streaming-)diloco (0.7) follows the mean change.",
        above=0,
        matters=RESULT,
    )
    outer_momentum: float | None = setting(
        None,
        "Momentum from exchange to exchange, of slowmo (default 0.6) and (streaming-)diloco (0.9).",
        at_least=0,
        at_most=0.9999,
        matters=RESULT,
    )
    # Post-local SGD: Lin et al. 2018 (arXiv 1808.07217).
    post_local_start: int = setting(
        0,
        "Of local-sgd: the first steps, each of which ends with an exchange.",
        at_least=0,
        matters=RESULT | TIME,
    )
    # Streaming DiLoCo, with the two settings below: Douillard et al. 2025 (arXiv 2501.18512).
    fragments: int | None = setting(
        None,
        "Of streaming-diloco: groups of layers that are exchanged in turn, all within --period; default at most 4.",
        at_least=1,
        matters=RESULT | TIME,
    )
    overlap: int | None = setting(
        None,
        "Of streaming-diloco: steps that continue beside a fragment's exchange; default 1.",
        at_least=0,
        matters=RESULT | TIME,
    )
    mixing: float | None = setting(
        None,
        "Of streaming-diloco: share of the outer weights where a fragment comes back (1: all); default 0.5.",
        above=0,
        at_most=1,
        matters=RESULT,
    )
    variant: str = setting(
        "3",
        "Of sync-easgd: 1 tree reduction, 2 center on every rank, 3 also overlapped.",
        choices=("1", "2", "3"),
        matters=RESULT | TIME,
    )
    unpacked: bool = setting(False, "Exchange layer by layer instead of in one message.", matters=TIME)
    groups: int = setting(
        1,
        "Groups that the cores of a node are split in; gradients are summed over them.",
        at_least=1,
        matters=RESULT | TIME,
    )

    @property
    def period_steps(self) -> int:
        """Steps between two exchanges; 0 if the run finds their number by itself."""
        return 0 if self.period == AUTO else int(self.period)


@dataclass(frozen=True, kw_only=True)
class RanksConfig:
    """How ranks are started."""

    ranks: int = setting(1, "Number of processes in all.", at_least=1, matters=EXTENT)
    profile: str = setting(
        "auto", "Node profile of `hpcdl tune-threads`: a file, `none`, or `auto`, the best that fits.", matters=TIME
    )
    # oneDNN adds in another order, so it changes the last bits of results.
    onednn: str = setting(
        AUTO,
        "Whether TensorFlow computes with oneDNN; auto: as the node profile says, else as TensorFlow does.",
        choices=(AUTO, "on", "off"),
        matters=RESULT | TIME,
    )
    allocator: str = setting(
        AUTO,
        "Memory allocator of the ranks; auto: the node profile's, else the system's, which is `default`.",
        choices=(AUTO, *ALLOCATORS),
        matters=TIME,
    )
    inter_op_threads: int | str = setting(
        AUTO,
        "Operations that a rank runs at a time; auto: as the node profile says, else 2.",
        kind="count",
        at_least=1,
        matters=TIME,
    )


@dataclass(frozen=True, kw_only=True)
class StartConfig(RanksConfig):
    """How ranks are started, with which software, and which trace of their steps is kept."""

    stage_env: bool = setting(
        False, "Unpack the Python environment on each node's own storage before the ranks start.", matters=NOTHING
    )
    # A module may bring another TensorFlow, so results may differ.
    module: str | None = setting(
        None, "Environment modules to load first, by commas, such as hpcdl/0.2.0.", matters=RESULT | TIME
    )
    trace: str = setting(
        UNASKED,
        "What `hpcdl trace` can look into: a level (off, steps, full), and steps=9:99,every=50,ranks=0-7,size=64MiB.",
        kind="trace",
        matters=TIME,
    )


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(StartConfig):
    """The same, and where the run is written."""

    run_dir: Path | None = setting(
        None,
        "Folder of the run; default runs/<time>-<model>-<strategy>, of a script runs/<time>-<script>-script.",
        matters=NOTHING,
    )
    warmup_steps: int = setting(3, "First steps that throughput leaves out.", at_least=0, matters=NOTHING)


@dataclass(frozen=True, kw_only=True)
class RunConfig(LaunchConfig):
    """The length of a run, its seed and its output."""

    epochs: int | None = setting(
        None, "Passes over the data; default 1 unless --steps is given.", at_least=1, matters=EXTENT
    )
    steps: int | None = setting(None, "Optimizer steps, in place of --epochs.", at_least=1, matters=EXTENT)
    # It changes no result: a call of several steps computes the same bits as calls of one.
    steps_per_call: int | str = setting(
        "auto",
        "Most steps in one call of the graph; auto: those of a tenth of a second on one worker, else 1.",
        kind="count",
        at_least=1,
        matters=TIME,
    )
    seed: int = setting(0, "Seed of weights, order of samples and dropout.", at_least=0, matters=RESULT | REPEAT)
    deterministic: bool = setting(
        False, "Same numbers at every run: op determinism and fixed thread counts.", matters=RESULT | TIME
    )
    tensorboard: Path | None = setting(
        None, "Folder for TensorBoard's event files, written by rank 0.", matters=NOTHING
    )


BACKGROUND = (
    "Where checkpoints are written: in gaps in which a rank waits, by a thread beside the steps, or in the step."
)
WAYS = ("gaps", "thread", "off")


@dataclass(frozen=True, kw_only=True)
class InterruptionConfig:
    """When a run saves, and when it stops."""

    resume: bool = setting(
        False, "Resume the run in --run-dir; start it where the folder is empty or missing.", matters=NOTHING
    )
    from_scratch: bool = setting(
        False, "With --resume: start again at step 0; earlier checkpoints and model are moved aside.", matters=NOTHING
    )
    from_step: int | None = setting(
        None,
        "With --resume: resume from the checkpoint after this step, not the newest.",
        at_least=1,
        matters=NOTHING,
    )
    checkpoint_every: float | str = setting(
        600.0,
        "Time between checkpoints; auto finds it from what they cost and from --mtbf.",
        kind="interval",
        above=0,
        matters=NOTHING,
    )
    # 150 days: 6.5 failures per 1,000 node-days (Kokolis et al., see docs/how-to/checkpoints.md).
    mtbf: float = setting(
        12_960_000.0,
        "Mean time between failures of one node, for --checkpoint-every auto.",
        kind="seconds",
        above=0,
        matters=NOTHING,
    )
    keep_checkpoints: int = setting(3, "Number of checkpoints kept.", at_least=1, matters=NOTHING)
    time_limit: float | None = setting(
        None, "Save and stop with exit 75 after this time.", kind="seconds", above=0, matters=NOTHING
    )
    elastic: bool = setting(
        False,
        "When a rank is lost, start new ones by itself, from the newest checkpoint on.",
        matters=NOTHING,
    )
    min_workers: int | None = setting(
        None,
        "With --elastic: continue with fewer workers after losing nodes, down to this many.",
        at_least=1,
        matters=NOTHING,
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(InterruptionConfig):
    """What survives an interruption of a training."""

    background: str = setting("thread", BACKGROUND, choices=WAYS, matters=TIME)
    local_checkpoint_every: int = setting(
        0,
        "With --elastic: steps between copies of the state in the nodes' memory; 0 makes none.",
        at_least=0,
        matters=NOTHING,
    )
    local_checkpoint_redundancy: str = setting(
        "none",
        "What makes good the copies of a node that is lost: nothing, a partner node, or parity over groups of nodes.",
        choices=("none", "partner", "xor"),
        matters=NOTHING,
    )
    local_checkpoint_folder: Path = setting(
        Path("/dev/shm"), "Where each node keeps these copies: its memory, or storage of its own.", matters=NOTHING
    )
    evict_slow: float | None = setting(
        None,
        "With --elastic: drop a worker that stays slower than the median by this factor.",
        above=1,
        matters=NOTHING,
    )
    on_fewer_workers: str = setting(
        KEEP_BATCH,
        "What stays with fewer workers: the samples of a step, or those of a worker and the rate for each.",
        choices=(KEEP_BATCH, SCALE_RATE),
        matters=NOTHING,
    )
    allow: Sequence[str] = setting(
        (), "With --resume: continue although this setting differs; may be repeated.", kind="names", matters=NOTHING
    )


@dataclass(frozen=True, kw_only=True)
class WaitConfig:
    """How long ranks wait for each other."""

    stall_timeout: float = setting(
        300.0,
        "End the run when a rank waits this long for one that is gone or stuck.",
        kind="seconds",
        above=0,
        matters=NOTHING,
    )
    busy_timeout: float = setting(
        3600.0,
        "End the run when a rank waits this long for one that computes.",
        kind="seconds",
        above=0,
        matters=NOTHING,
    )


@dataclass(frozen=True, kw_only=True)
class WatchConfig(WaitConfig):
    """The same, and injected faults."""

    inject: str = setting(
        "",
        "Faults on purpose, to see what a run survives, as kill:rank=1@step=50; several with commas.",
        matters=TIME,
    )


@dataclass(frozen=True, kw_only=True)
class SafetyConfig(WatchConfig):
    """When a failing run is ended."""

    divergence_check_steps: int = setting(
        1000,
        "Compare a hash of all weights over the ranks every so many steps; 0 turns it off.",
        at_least=0,
        matters=NOTHING,
    )
    allow_grpc: bool = setting(False, ALLOW_GRPC, matters=NOTHING)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All groups of one training run."""

    model: ModelConfig
    data: DataConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig
    exchange: ExchangeConfig
    elastic: ElasticConfig
    run: RunConfig
    checkpoint: CheckpointConfig
    safety: SafetyConfig


@dataclass(frozen=True, kw_only=True)
class StepBenchRun:
    """What `bench step` measures, how often, and on which data."""

    batch_size: int = setting(32, "Samples per worker and step.", at_least=1)
    data: Path | None = setting(None, "Folder made by `hpcdl shard`; by default samples are made up once.")
    ranks: int = setting(1, "Number of processes in all; under srun or mpiexec theirs counts.", at_least=1)
    steps: int = setting(20, "Steps measured with, and as many without, the exchange.", at_least=1)
    exchange_only: bool = setting(False, "Leave out the steps without exchange: half the time, no efficiency.")
    warmup_steps: int = setting(3, "Steps of each kind left out first.", at_least=0)
    seed: int = setting(0, "Seed of weights and samples.", at_least=0)
    deterministic: bool = setting(False, "Op determinism and fixed thread counts, to see what they cost.")
    profile: str = setting("none", "Node profile: a file, `none`, or `auto`, the best that fits.")
    allow_grpc: bool = setting(False, ALLOW_GRPC)


@dataclass(frozen=True, kw_only=True)
class StepBenchConfig:
    """All groups of `bench step`."""

    model: ModelConfig
    exchange: ExchangeConfig
    elastic: ElasticConfig
    optimizer: OptimizerConfig
    run: StepBenchRun


@dataclass(frozen=True, kw_only=True)
class AllreduceBenchRun:
    """What `bench allreduce` measures."""

    ranks: int = setting(2, "Number of processes in all; under srun or mpiexec theirs counts.", at_least=1)
    sizes: str = setting("4KiB,64KiB,1MiB,25MiB", "Sizes of the summed buffer, with commas between.")
    repeats: int = setting(10, "Timed calls of each algorithm at each size, after one that warms up.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class AllreduceBenchConfig:
    """All groups of `bench allreduce`."""

    run: AllreduceBenchRun


@dataclass(frozen=True, kw_only=True)
class PingpongBenchRun:
    """What `bench pingpong` sends, and by which transport."""

    transport: str = setting("mpi", "What carries the messages: MPI, or TensorFlow's gRPC.", choices=("mpi", "grpc"))
    sizes: str = setting("1B,16B,256B,4KiB,64KiB,1MiB,4MiB,16MiB,64MiB", "Sizes of the message, with commas between.")
    repeats: int = setting(31, "Timed round trips of each size; at most 5 above 1 MiB.", at_least=1)
    allow_grpc: bool = setting(False, ALLOW_GRPC)


@dataclass(frozen=True, kw_only=True)
class PingpongBenchConfig:
    """All groups of `bench pingpong`."""

    run: PingpongBenchRun


@dataclass(frozen=True, kw_only=True)
class PrecisionBenchRun:
    """What `bench precision` compares with float32."""

    model: str = setting(REQUIRED, "Network: a name of `hpcdl models`, or your own as file.py:build.")
    classes: int | None = setting(None, "Number of classes; by default as many as the data has.", at_least=1)
    precision: str = setting(
        "mixed_bfloat16", "Precision to compare with float32.", choices=("mixed_bfloat16", "mixed_float16")
    )
    batch_size: int = setting(32, "Samples of the one batch.", at_least=1)
    data: Path | None = setting(None, "Folder made by `hpcdl shard`; by default samples are made up.")
    epochs: int = setting(4, "Passes over the bundled digits, for the accuracy.", at_least=1)
    repeats: int = setting(3, "Trainings on the digits in each precision, each with a seed of its own.", at_least=1)
    seed: int = setting(0, "Seed of weights and samples; the first one on the digits.", at_least=0)


@dataclass(frozen=True, kw_only=True)
class PrecisionBenchConfig:
    """All groups of `bench precision`."""

    run: PrecisionBenchRun


@dataclass(frozen=True, kw_only=True)
class InputBenchRun:
    """How `bench input` reads, and on how many ranks."""

    ranks: int = setting(1, "Number of processes that read at once; under srun or mpiexec theirs counts.", at_least=1)
    batch_size: int = setting(32, "Samples per rank and batch.", at_least=1)
    steps: int = setting(100, "Batches that each rank is timed over.", at_least=1)
    step_ms: float | None = setting(None, "Time of a training step, in milliseconds.", at_least=0)
    seed: int = setting(0, "Seed of the order.", at_least=0)
    shuffle: str = setting(
        "global", "Shuffle over the whole data set, or over each node's share of it.", choices=("global", "local")
    )
    stage: Path | None = setting(None, "Copy the shards to this node-local folder first; removed afterwards.")


@dataclass(frozen=True, kw_only=True)
class InputBenchConfig:
    """All groups of `bench input`."""

    run: InputBenchRun


@dataclass(frozen=True, kw_only=True)
class TuneWorkload:
    """What every trial trains."""

    model: str | None = setting(None, "Network to tune for: a name from `hpcdl models`, or your own file.py:build.")
    batch_size: int = setting(32, "Samples per worker and step.", at_least=1)
    batch_sizes: str | None = setting(None, "Batch sizes to search too, by commas: 32,64,128.")
    data: str | None = setting(None, "Folder made by `hpcdl shard`; by default samples are made up.")
    steps: int = setting(20, "Steps that each trial measures.", at_least=1)


@dataclass(frozen=True, kw_only=True)
class TuneSearch:
    """The budget and the space of the search."""

    budget: float = setting(600.0, "Time for the whole search.", kind="seconds", above=0)
    max_samples: int | None = setting(None, "At most so many samples, however long each takes.", at_least=1)
    precision: float = setting(0.03, "Relative half width of the winner's 95 % interval that is enough.", above=0)
    trial_timeout: float = setting(300.0, "A trial that takes longer is killed.", kind="seconds", above=0)
    ranks_per_node: int | None = setting(None, "Search with this number of ranks only.", at_least=1)
    space: Path | None = setting(None, "TOML file of levels (setting = [values]) that narrows or extends the space.")
    machine: str | None = setting(
        None, "Node type to plan for with --plan, or this one's: a name, a TOML or hwloc XML file."
    )
    seed: int = setting(0, "Seed of the search.", at_least=0)


@dataclass(frozen=True, kw_only=True)
class TuneOutput:
    """Where the result is written."""

    out: Path | None = setting(None, "Profile file; by default in the user's folder of profiles, where train looks.")
    site: bool = setting(False, "Store the profile for everybody, in the installation's share folder.")
    log: Path | None = setting(None, "Trial log; by default beside the profile.")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """All groups of one search."""

    workload: TuneWorkload
    search: TuneSearch
    output: TuneOutput


@dataclass(frozen=True, kw_only=True)
class StateConfig(InterruptionConfig):
    """What survives an interruption of a script, by hpcdl.State."""

    background: str = setting("off", BACKGROUND, choices=WAYS, matters=TIME)


@dataclass(frozen=True, kw_only=True)
class ScriptModelConfig:
    """How the layers of a script's models compute, once the script makes a distributed object."""

    fast_kernels: str = setting("off", FAST_KERNELS, choices=(AUTO, "on", "off"), matters=RESULT | TIME)


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """All groups of a run of the user's own script."""

    model: ScriptModelConfig
    run: LaunchConfig
    checkpoint: StateConfig
    safety: WatchConfig
