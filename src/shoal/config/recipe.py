"""The recipe: everything a run is made of, as data. One YAML file says it; the command line can say any key again.

Every field is documented below its default; the command line, its help and the JSON schema are derived from here, so
this file is the only place where a setting is named.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bounds import MOST_BATCH, MOST_RANKS, MOST_SEQUENCE, check_bounds
from shoal.config.duration import Duration
from shoal.errors import ShoalError, raise_if


def _not_bool(value: Any) -> Any:
    """Python counts True as 1; a person who writes `lr: true` does not."""
    if isinstance(value, bool):
        raise ShoalError("a number is wanted", fix="a number")
    return value


Number = BeforeValidator(_not_bool)
PositiveInt = Annotated[int, Number, Field(gt=0)]
PositiveFloat = Annotated[float, Number, Field(gt=0)]
NotNegative = Annotated[float, Number, Field(ge=0)]
Fraction = Annotated[float, Number, Field(ge=0, le=1)]
BelowOne = Annotated[float, Number, Field(ge=0, lt=1)]

DurationField = Annotated[
    Duration,
    BeforeValidator(lambda value: value if isinstance(value, Duration) else Duration.parse(value)),
    PlainSerializer(str),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["1000step", "2epoch", "1e9tok", "10min"]}),
]
PlanField = Annotated[
    Plan,
    BeforeValidator(lambda value: Plan.of(value)),
    PlainSerializer(str),
    WithJsonSchema({"type": ["string", "object"], "examples": ["auto", "dp_replicate=2 zero=0 mb=4"]}),
]


class Section(BaseModel):
    """A part of a recipe: frozen, and no key that is not known."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class ModelSection(Section):
    """The model. Keys beside these two are handed to it by name: `num_layers: 4`, `hidden: 256`."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str = "llama"
    """`llama`, `moe`, `resnet` or `mlp`; or `path/to/file.py:function`, which is called and returns an `nn.Module`."""

    preset: str | None = None
    """A named size, for example `tiny` or `llama3-8b`. None: the model's own defaults."""

    @model_validator(mode="after")
    def _not_absurd(self) -> ModelSection:
        if ".py" not in self.name:  # what the numbers of a user's own function mean is not known
            raise_if(check_bounds((self.model_extra or {}).items()))
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """What the model's builder is called with."""
        preset = {} if self.preset is None else {"preset": self.preset}
        return {**preset, **(self.model_extra or {})}


class DataSection(Section):
    """What is trained on, and how it is cut into samples."""

    source: str = "python"
    """`python`: the source of Python's own standard library, which every machine has. `synthetic`: made up on the spot.
    `hf:NAME`: a Hugging Face dataset. Else a path: a text file or a folder of them, `.jsonl`, token shards (`.bin`,
    `.npy`, or a folder of those), or a folder with one folder of images per class."""

    format: Literal["auto", "text", "jsonl", "tokens", "images"] = "auto"
    """What a path holds. auto: told from its ending."""

    tokenizer: str = "bytes"
    """`bytes`: every byte is a token. Else a Hugging Face `tokenizer.json` (needs the extra `hf`)."""

    seq_len: Annotated[PositiveInt, Field(le=MOST_SEQUENCE)] = 256
    """Tokens per sample."""

    global_batch: Annotated[PositiveInt, Field(le=MOST_BATCH)] = 32
    """Samples per optimizer step, over all ranks and microbatches. It stays the same when the world changes."""

    mask_documents: bool = False
    """True: several documents packed into one sample neither see each other nor predict each other's first token."""

    validation: BelowOne = 0.01
    """The part of the samples that is held out for evaluation."""

    text_field: str = "text"
    """The key that holds the text in JSONL or in a Hugging Face dataset."""

    token_dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    """How tokens are stored in a `.bin` file, which does not say so itself."""

    end_token: Annotated[int, Field(ge=0)] | None = None
    """The token id that ends a document in token shards; `mask_documents` needs it there. Text has its own."""

    image_size: PositiveInt = 32
    """Height and width that images are scaled to."""

    synthetic_samples: PositiveInt = 4096
    """How many samples `synthetic` makes up."""

    synthetic_kind: Literal["tokens", "images"] = "tokens"
    """What `synthetic` makes up."""

    vocabulary: PositiveInt = 256
    """Number of different tokens that `synthetic` draws from, or classes of its images."""

    changed: Literal["reject", "accept"] = "reject"
    """Whether a run resumes when `source` no longer holds the samples that its checkpoint was trained on: the number of
    samples and a fingerprint of them are compared (docs/concepts/data-order.md). accept: resume on the changed data."""

    workers: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """Processes that prepare batches beside the training process. 0: a thread does. auto: the first batches are timed,
    and processes are started if one takes more than 10 ms."""

    prefetch: PositiveInt = 2
    """Batches prepared ahead, per worker."""


class OptimSection(Section):
    """The optimizer, its learning rate over time, and what is done to gradients before it sees them."""

    name: Literal["adamw", "sgd"] = "adamw"
    """The optimizer."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay (adamw) or L2 penalty (sgd) of every parameter with at least two dimensions."""

    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay of the first and second moment (adamw)."""

    eps: PositiveFloat = 1e-8
    """Added to the denominator (adamw)."""

    momentum: Fraction = 0.9
    """Momentum (sgd)."""

    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """How the update is computed; the arithmetic is the same. auto: the fastest that there is for this device."""

    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """What adamw keeps its two moments in. bf16: half their memory, rounded at random so that small changes still add
    up; weights and arithmetic stay in float32."""

    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """What parameters and their gradients are kept in. bf16 (adamw alone, with precision bf16 or fp8): half their
    memory and traffic; updates are computed in float32, and weights are rounded at random so that small changes still
    add up. There are no master weights, and gradients of several microbatches are summed up in bfloat16."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The learning rate after warm-up, over the rest of the run."""

    warmup: DurationField = Duration(0, "step")
    """How long the learning rate rises linearly from zero."""

    final_lr: Fraction = 0.1
    """Where the schedule ends, as a fraction of `lr`. constant ignores it."""

    scale_lr_from_batch: PositiveInt | None = None
    """The batch that `lr` was tuned for; the linear scaling rule multiplies `lr` by batch / this. None: leave `lr`."""

    clip: PositiveFloat | None = 1.0
    """The largest global gradient norm; larger ones are scaled down to it. None: no clipping."""

    loss_scale: PositiveFloat = 65536.0
    """The first loss scale under fp16; it halves on overflow and doubles after `loss_scale_window` good steps."""

    loss_scale_window: PositiveInt = 2000
    """Steps without overflow before the loss scale is doubled."""


class LaunchSection(Section):
    """The processes of a run on this machine. Under torchrun, Slurm or mpirun theirs are used, and none is started."""

    nproc: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Processes to start here. None: one per GPU, or a single one without."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live. auto: cuda if there is one."""

    threads: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """CPU threads per process. None: the cores of this machine shared out evenly."""

    timeout: Annotated[float, Number, Field(gt=0, le=1e8)] = 600.0
    """Seconds that any wait may take: of a rank for the others, in a step or in a save; for a batch; of the launcher
    for the other ranks when one has ended, or for one that is stopped (SIGSTOP). Longer than the slowest save takes."""

    grace_period: PositiveFloat = 30.0
    """Seconds that ranks have to finish their step, and to save, after Ctrl-C, SIGTERM or SIGUSR1 before they are
    killed."""

    max_restarts: Annotated[int, Number, Field(ge=0)] = 3
    """How often all workers are started again, from the last checkpoint, after one of them has died. Counted from 0
    again whenever a newer step was saved since the last restart. torchrun has its own flag of this name."""


LONGEST_NAME = 200
"""Bytes of the name of a run: with a number behind it, it is the name of a directory."""


def _name(value: Any) -> Any:
    """A name is one directory of `runs/`, and never a way out of it."""
    if not isinstance(value, str):
        return value
    size = len(value.encode(errors="replace"))
    if size > LONGEST_NAME:
        raise ShoalError(f"a name has at most {LONGEST_NAME} bytes, and this one has {size:,}", fix="a shorter name")
    if not value.strip() or "/" in value or value in (".", "..") or not value.isprintable():
        raise ShoalError(
            f"{value!r} is not the name of a directory: it must be printable, without a slash, and not '.' or '..'",
            fix="--run.name NAME, or --run.dir PATH for a place elsewhere",
        )
    return value


def _interval(value: Any) -> Any:
    """`auto`, or a duration as it is spelled everywhere."""
    return "auto" if value == "auto" else str(Duration.parse(value))


class CheckpointSection(Section):
    """When a run is saved, and where. The same command goes on from the last step that was saved, on any layout."""

    every: Annotated[str, BeforeValidator(_interval)] = "auto"
    """How often: `100step`, `10min`; 0step: only when the run ends or is asked to stop. auto: so often that saving and
    doing steps over after a failure together cost least, from the measured cost of a save and from `mtbf`."""

    dir: str | None = None
    """A folder, or a URL of an object store (`s3://bucket/run`). None: `checkpoints` in the run directory."""

    keep: Annotated[int, Number, Field(ge=2)] = 2
    """How many of the newest steps are kept; two at least, since one may be damaged."""

    mtbf: DurationField = Duration(24, "h")
    """The mean time between two failures that `auto` reckons with."""

    memory_every: DurationField = Duration(0, "step")
    """How often the state is also kept in this host's shared memory, from which a run goes on after a worker has died
    without reading a disk: `1step`. It takes two to three times the size of the state. 0step: never."""

    memory_dir: str = "/dev/shm"
    """The memory file system to keep it in."""


class CommSection(Section):
    """What carries tensors between replicas (`dp_replicate`), and how islands (`sync=` in the plan) meet."""

    algorithm: Literal["builtin", "ring", "tree", "double_tree", "halving", "hierarchical", "naive", "auto"] = "builtin"
    """builtin: torch's own collectives. auto: what is fastest for the buckets of this run, measured before its first
    step. Else a list of messages of that name (docs/concepts/collectives.md)."""

    warmup_steps: Annotated[int, Number, Field(ge=0)] | None = None
    """How many of the first steps send gradients as they are, although the plan compresses or has islands: they are the
    largest, and the moments of the optimizer begin with them. None: 50 for `1bit`, `topk`, `randomk` and `powersgd`,
    else 0."""

    outer_lr: PositiveFloat = 0.7
    """Under `sync=diloco:H`, the learning rate of the optimizer of the weights that islands share."""

    outer_momentum: BelowOne = 0.9
    """Its Nesterov momentum."""

    fragments: PositiveInt = 1
    """In how many parts those weights travel, one after the other, within H steps."""

    outer_delay: Annotated[int, Number, Field(ge=0)] = 0
    """How many steps later what was sent is applied; until then it travels while islands go on."""

    rescale: bool = True
    """Under `sync=local:H` with Adam, make the mean of what islands did as long as the step of one model would be: an
    island's gradients are noisier, and Adam divides by that (docs/concepts/slow-links.md)."""


class RunSection(Section):
    """The run: how long, how often, where to."""

    name: Annotated[str, BeforeValidator(_name)] = "run"
    """Names the run directory and the run in a tracker."""

    dir: str | None = None
    """The run directory. None: the last of `runs/NAME`, `runs/NAME-2`, ... if it holds a run of this recipe that has
    not ended, which then goes on; else the first one that is free. A new one has mode 0700, since it holds samples of
    the data: `mkdir -m 750` before, or `chmod` after, opens it to others."""

    overwrite: bool = False
    """True: an earlier run in `dir` is removed first, with its checkpoints."""

    start_from: str | None = None
    """A run directory, one of its steps, a folder or a URL of checkpoints, or what `shoal checkpoint import` has made:
    the run begins with its weights. None: with weights drawn from the seed."""

    duration: DurationField = Duration(200, "step")
    """How long to train: `1000step`, `2epoch`, `1e9tok`, `10min`."""

    seed: int = 0
    """Decides the initial weights, the order of the samples and all randomness in the model."""

    log_every: PositiveInt = 1
    """Steps between two lines in metrics.jsonl."""

    evaluate_every: DurationField = Duration(0, "step")
    """How often to evaluate on the held-out samples, beside once at the end. 0step: only then."""

    per_rank_metrics: bool = False
    """True: every rank also writes its own metrics (`metrics.rank3.jsonl`)."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where metrics go beside metrics.jsonl; each needs the extra of its name."""

    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    """When the gradient is not finite: end the run, drop this step's update, or carry on. The first two say which rank
    and microbatch it came from."""

    check_replicas: DurationField = Duration(0, "step")
    """How often ranks compare checksums of all that they hold copies of: `100step`. A flipped bit in one of them ends
    the run, with its tensor and rank. 0step: never."""

    deterministic: bool = False
    """True: the same bits again on the same layout, also on CUDA. Slower there."""

    fast_dev_run: bool = False
    """True: three steps and a short evaluation, nothing kept. To see whether everything fits together."""

    bucket_mb: PositiveFloat | Literal["auto"] | None = None
    """Size in MB of the buckets in which gradients are reduced over `dp_replicate`. None: 25, but 1 for the first one,
    so that the reduction begins early. auto: by what the link can do, measured before the first step; under `compress=`
    a run that goes on may then round otherwise."""

    planned: bool = False
    """True: the planner fills in what the plan leaves open. `plan: auto` says the same."""

    find_unused_parameters: bool = False
    """True: parameters may be without a gradient in some steps (branches that are not taken). Costs a walk over the
    graph in every step with several ranks."""

    sync_batch_norm: bool = False
    """True: batch norm normalises with the mean and variance of a microbatch over all ranks. false: of each rank's part
    of it."""

    compile: bool = False
    """True: torch.compile makes each block of the model faster, after 5 to 30 seconds of compiling for a Llama."""

    attention: Literal["auto", "cudnn", "flash", "efficient", "math"] = "auto"
    """Which of torch's kernels computes attention on a GPU. auto: the fastest one that takes the shape; a named one
    that does not take it is an error. Ring attention, CPUs, and models that do not call `shoal.Attention`, have kernels
    of their own."""

    fp8: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Under `precision: fp8`, what of a tensor shares one scale. rowwise is more exact, and slower on an H200."""

    fp8_min_features: PositiveInt | None = None
    """Under `precision: fp8`, layers with fewer features than this stay in bf16. None: 512."""

    fp8_head: Literal["gradients", "none"] = "gradients"
    """Under `precision: fp8`, what a head that computes the loss (`loss: fused`) computes in fp8: its gradients, or
    nothing. Its logits, and with them the loss, are computed in bf16 either way; and so is all of it where tokens of a
    microbatch, features or words are no multiples of 16."""

    recompute_swiglu: bool = True
    """Make what a gated feed-forward gives to its last layer again in the backward. false: keep it, which takes a sixth
    more memory of a Llama of 1.5 B parameters, and saves half a per cent of its time."""

    loss: Literal["auto", "fused", "plain"] = "auto"
    """fused: the last layer of the model computes the loss, a part of the tokens at a time, and all logits never exist
    at once. plain: the model returns logits. auto: fused wherever a rank has the whole layer (no tp, no pp)."""


class Recipe(Section):
    """Model + data + optimizer + plan + run. See docs/recipes for complete ones."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    plan: PlanField = Plan()
    """The parallel layout: words such as `dp_replicate=2 mb=4 bf16`, or the same as keys. `auto`, alone or among other
    words, lets the planner fill in what they leave open."""
    launch: LaunchSection = LaunchSection()
    checkpoint: CheckpointSection = CheckpointSection()
    comm: CommSection = CommSection()
    run: RunSection = RunSection()
