"""The recipe: all settings of a run, as data. A YAML file holds it; the command line can override any key.

Every field is documented below its default. The command line, its help and the JSON schema are derived from here, so a
setting is defined in one place: here, or for `data:` in data_section.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator

from shoal.blueprint.plan import Plan
from shoal.blueprint.validation.bounds import MOST_RANKS, check_bounds
from shoal.config.comm_section import CommSection as CommSection
from shoal.config.data_section import DataSection as DataSection
from shoal.config.duration import Duration
from shoal.config.fields import (
    BelowOne,
    DurationField,
    Fraction,
    NotNegative,
    Number,
    PlanField,
    PositiveFloat,
    PositiveInt,
    Section,
)
from shoal.errors import ShoalError, raise_if


class LoraSection(Section):
    """LoRA: small trained matrices beside frozen weights (docs/finetune.md). `--model.lora.rank 16` turns it on."""

    rank: PositiveInt = 16
    """Rows of the matrix A, and columns of B."""

    alpha: PositiveFloat | None = None
    """The update is scaled by alpha / rank. None: twice the rank."""

    targets: tuple[str, ...] | str = "all-linear"
    """Last parts of the names of linear layers, such as `[q_proj, v_proj]`; a regular expression that matches whole
    names; or `all-linear`, every linear layer except the head."""

    dropout: BelowOne = 0.0
    """Dropout of the input of the update."""

    modules_to_save: tuple[str, ...] | None = None
    """Last parts of the names of modules that train whole and are saved with the adapters. None: the head of a
    classifier, which begins with random weights."""

    base: Literal["nf4"] | None = None
    """nf4: the frozen weights of layers with LoRA are packed in 4 bits as they are loaded (docs/finetune.md). None:
    they stay as they are."""

    adapter: str | None = None
    """A folder with `adapter_model.safetensors`, as PEFT and `shoal checkpoint export` write it, to start from. Rank,
    alpha, targets and modules_to_save are then those of the folder."""


class ModelSection(Section):
    """The model. Other keys are passed to it by name: `num_layers: 4`, `hidden: 256`."""

    model_config = ConfigDict(extra="allow", frozen=True, use_attribute_docstrings=True)

    name: str = "llama"
    """`llama`, `moe`, `resnet` or `mlp`; or `path/to/file.py:function`, a function that returns an `nn.Module`; or
    `hf:FOLDER`, a model of transformers (docs/huggingface.md), also by its name on the hub."""

    preset: str | None = None
    """A named size, for example `tiny` or `llama3-8b`. None: the model's own defaults."""

    lora: LoraSection | None = None
    """Train small matrices beside frozen weights. None: train all weights."""

    @model_validator(mode="after")
    def _check_bounds(self) -> ModelSection:
        if ".py" not in self.name:  # the arguments of a user's own function have no known bounds
            raise_if(check_bounds((self.model_extra or {}).items()))
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the model's builder."""
        preset = {} if self.preset is None else {"preset": self.preset}
        return {**preset, **(self.model_extra or {})}


class OptimSection(Section):
    """The optimizer, its learning rate schedule, gradient clipping and loss scaling."""

    name: Literal["adamw", "sgd", "lion", "muon", "adafactor", "lamb", "lars"] = "adamw"
    """The optimizer. adamw, sgd and lion update every element by itself, on every layout. muon, lamb and lars read
    whole tensors: they need tp=1 and ep=1. adafactor also needs zero=0."""

    @field_validator("name", mode="before")
    @classmethod
    def _reject_two_weights(cls, value: Any) -> Any:
        if isinstance(value, str) and value.replace("_", "").replace("-", "").startswith("schedulefree"):
            raise ShoalError(
                f"optim.name {value} evaluates other weights than it trains, which recipes do not know",
                fix="--optim.name adamw; or schedulefree.AdamWScheduleFree in a script with shoal.Run (docs/run.md)",
                code="T074",
            )
        return value

    lr: PositiveFloat = 3e-4
    """Peak learning rate."""

    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, or L2 penalty (sgd, lars), of every parameter with at least two dimensions."""

    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay of the first and second moment (adamw, lamb, and what muon leaves to adamw); of the update and of the
    moment (lion, usually 0.9 and 0.99)."""

    eps: PositiveFloat = 1e-8
    """Added to the denominator (adamw, lamb)."""

    momentum: Fraction = 0.9
    """Momentum (sgd, lars, and muon, usually 0.95)."""

    trust: PositiveFloat = 1e-3
    """The coefficient of the ratio of norms (lars)."""

    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """The kernels of the update; the arithmetic is the same. auto: the fastest for this device."""

    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype of adamw's two moments. bf16: half their memory, with stochastic rounding so that small changes still
    add up. Weights and arithmetic stay in float32."""

    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """The dtype of parameters and their gradients. bf16 (adamw only, with precision bf16 or fp8): half their memory and
    traffic. Updates are computed in float32, with stochastic rounding so that small changes still add up. There are no
    master weights, and gradients of several microbatches are summed in bfloat16."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The learning rate after warm-up, over the rest of the run."""

    warmup: DurationField = Duration(0, "step")
    """The duration of the linear rise of the learning rate from zero."""

    final_lr: Fraction = 0.1
    """The learning rate at the end, as a fraction of `lr`. constant ignores it."""

    scale_lr_from_batch: PositiveInt | None = None
    """The batch that `lr` was tuned for; the linear scaling rule multiplies `lr` by batch / this. None: leave `lr`."""

    clip: PositiveFloat | None = 1.0
    """The largest global gradient norm; larger ones are scaled down to it. None: no clipping."""

    loss_scale: PositiveFloat = 65536.0
    """The first loss scale under fp16; it halves on overflow and doubles after `loss_scale_window` good steps."""

    loss_scale_window: PositiveInt = 2000
    """Steps without overflow before the loss scale is doubled."""

    loss_mean: Literal["global", "microbatch"] = "global"
    """global: the mean over all labels of the global batch. microbatch: the mean of the means of microbatches and
    ranks, as DeepSpeed has it (docs/deepspeed.md). They differ where microbatches have other numbers of labels."""


class LaunchSection(Section):
    """The processes of a run on this machine. torchrun, Slurm and mpirun start their own, and shoal none."""

    nproc: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """Processes to start on this machine. None: one per GPU, or one without GPUs."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device of the tensors. auto: cuda if available."""

    threads: Annotated[PositiveInt, Field(le=MOST_RANKS)] | None = None
    """CPU threads per process. None: the cores of this machine, divided evenly."""

    timeout: Annotated[float, Number, Field(gt=0, le=1e8)] = 600.0
    """The longest wait in seconds. It applies to a rank that waits for others in a step or a save, or for a batch. It
    also applies to the launcher that waits for ranks after one has ended. Ranks that hang in a step are ended much
    earlier (docs/faults.md). Set it longer than the slowest save."""

    grace_period: PositiveFloat = 30.0
    """Seconds that ranks have to finish their step and to save after Ctrl-C, SIGTERM or SIGUSR1. Then they are
    killed."""

    max_restarts: Annotated[int, Number, Field(ge=0)] = 3
    """The number of restarts of all workers from the last checkpoint after one of them has died. The count starts over
    when a newer step was saved since the last restart. torchrun has its own flag of this name."""

    recovery: Literal["replace", "restart"] = "replace"
    """What is done after one process on one host without GPUs has died. replace: start that process again; the others
    stay, and all load the last checkpoint. restart: start all processes again, as after any other failure, and with
    `run.compile`."""


LONGEST_NAME = 200
"""Bytes of the name of a run. With a number appended, it names a directory."""


def _name(value: Any) -> Any:
    """Check that a name is one directory of `runs/`."""
    if not isinstance(value, str):
        return value
    size = len(value.encode(errors="replace"))
    if size > LONGEST_NAME:
        raise ShoalError(
            f"a name must have at most {LONGEST_NAME} bytes, got {size:,}", fix="--run.name SHORTER_NAME", code="R015"
        )
    if not value.strip() or "/" in value or value in (".", "..") or not value.isprintable():
        raise ShoalError(
            f"a name must be printable, without a slash, and not '.' or '..', got {value!r}",
            fix="--run.name NAME, or --run.dir PATH for another directory",
            code="R015",
        )
    return value


def _interval(value: Any) -> Any:
    """`auto`, or a duration as it is spelled everywhere."""
    return "auto" if value == "auto" else str(Duration.parse(value))


class CheckpointSection(Section):
    """When and where checkpoints are saved. The same command resumes from the last saved step, on any layout."""

    every: Annotated[str, BeforeValidator(_interval)] = "auto"
    """The interval between saves: `100step`, `10min`. 0step: save only when the run ends or is stopped. auto: the
    interval with the least expected cost of saves and lost steps, from the measured cost of a save and `mtbf`."""

    dir: str | None = None
    """A folder, or a URL of an object store (`s3://bucket/run`). None: `checkpoints` in the run directory."""

    keep: Annotated[int, Number, Field(ge=2)] = 2
    """The number of checkpoints to retain; at least two, since one may be damaged."""

    mtbf: DurationField = Duration(24, "h")
    """The mean time between two failures, for `auto`."""

    memory_every: DurationField = Duration(0, "step")
    """The interval between saves to this host's shared memory, such as `1step`. After a worker has died, the run
    resumes from there without reading a disk. It takes two to three times the size of the state. 0step: never."""

    memory_dir: str = "/dev/shm"
    """The memory file system for `memory_every`."""


class RunSection(Section):
    """The run: its duration, directory, logging and compute settings."""

    name: Annotated[str, BeforeValidator(_name)] = "run"
    """The name of the run directory, and of the run in a tracker."""

    dir: str | None = None
    """The run directory. None: the last of `runs/NAME`, `runs/NAME-2`, ... if it holds an unfinished run of this
    recipe, which then resumes; else the first free one. A new directory has mode 0700, since it holds samples of the
    data. To open it to others, use `mkdir -m 750` before or `chmod` after."""

    overwrite: bool = False
    """True: remove an earlier run in `dir` first, with its checkpoints."""

    start_from: str | None = None
    """The source of the initial weights: a run directory, one of its steps, a folder or a URL of checkpoints, the
    output of `shoal checkpoint import`, or a folder of safetensors. None: those of a model `hf:FOLDER`; else weights
    drawn from the seed."""

    duration: DurationField = Duration(200, "step")
    """How long to train: `1000step`, `2epoch`, `1e9tok`, `10min`."""

    seed: int = 0
    """The seed of the initial weights, the order of the samples and all randomness in the model."""

    log_every: PositiveInt = 1
    """Steps between two lines in metrics.jsonl."""

    evaluate_every: DurationField = Duration(0, "step")
    """The interval between evaluations on the held-out samples. 0step: only at the end."""

    per_rank_metrics: bool = False
    """True: every rank also writes its own metrics (`metrics.rank3.jsonl`)."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Trackers for metrics beside metrics.jsonl; each needs the extra of its name."""

    ema: BelowOne | None = None
    """The decay of a moving average of the weights, such as 0.999. Evaluations use the average, and checkpoints hold it
    beside the weights. None: no average."""

    on_nan: Literal["stop", "skip", "ignore"] = "stop"
    """When the gradient is not finite: stop the run, skip the update of this step, or ignore it. stop and skip report
    the rank and the microbatch."""

    check_replicas: DurationField = Duration(0, "step")
    """The interval between comparisons of checksums of all replicated tensors: `100step`. A flipped bit ends the run
    with the name of its tensor and its rank. 0step: never."""

    check_compute: DurationField = Duration(0, "step")
    """The interval between steps in which each rank computes the gradients of another rank, too: `100step`. A rank that
    computes wrong is named. It costs a forward and a backward. For replicas on one rank each. 0step: never."""

    profile: DurationField = Duration(0, "step")
    """How many steps to time by part, after the first three: `5step`. profile.json and trace.json get the parts, and
    the run prints a verdict. `shoal profile` is the same for a short run. 0step: none."""

    deterministic: bool = False
    """True: bitwise reproducible on the same layout, also on CUDA. Slower there."""

    fast_dev_run: bool = False
    """True: three steps and a short evaluation, nothing saved. A quick test of all settings together."""

    bucket_mb: PositiveFloat | Literal["auto"] | None = None
    """Size in MB of the gradient buckets that are reduced over `dp_replicate`. None: 25, but 1 for the first one, so
    that the reduction begins early. auto: from the link, measured before the first step. Under `compress=` a resumed
    run may then round differently."""

    planned: bool = False
    """True: the planner fills in the open values of the plan. `plan: auto` is the same."""

    find_unused_parameters: bool = False
    """True: parameters may have no gradient in some steps (untaken branches). Costs a walk over the graph in every step
    with several ranks."""

    sync_batch_norm: bool = False
    """True: batch norm uses the mean and variance of a microbatch over all ranks. false: of each rank's part of it."""

    compile: bool = False
    """True: run each block of the model under torch.compile, which takes 5 to 30 seconds to compile a Llama."""

    attention: Literal["auto", "fa4", "cudnn", "flash", "efficient", "math"] = "auto"
    """The kernel of attention on a GPU. auto: the fastest one that supports the shape. fa4 is FlashAttention 4, an
    extra; the others are torch's. A named kernel that does not support the shape is an error. Ring attention, CPUs, and
    models that do not call `shoal.Attention` have their own kernels."""

    fused_layers: bool | None = None
    """True: norms, feed-forwards, attentions and embeddings of a model of transformers that shoal recognises are
    computed by shoal's operators, which save less and are faster. false: they stay. None: true on a GPU."""

    fp8: Literal["tensorwise", "rowwise"] = "tensorwise"
    """Under `precision: fp8`, the part of a tensor that shares one scale. rowwise is more exact, and slower on an
    H200."""

    fp8_min_features: PositiveInt | None = None
    """Under `precision: fp8`, layers with fewer features than this stay in bf16. None: 512."""

    fp8_head: Literal["gradients", "none"] = "gradients"
    """Under `precision: fp8`, the part of a loss head (`loss: fused`) that is computed in fp8: its gradients, or
    nothing. Logits and loss are always computed in bf16. The whole head stays in bf16 where the tokens of a microbatch,
    the features or the vocabulary are no multiples of 16."""

    recompute_swiglu: bool = True
    """True: recompute the input of the last layer of a gated feed-forward in the backward. false: store it, which takes
    a sixth more memory of a Llama of 1.5 B parameters, and saves half a per cent of its time."""

    loss: Literal["auto", "fused", "plain"] = "auto"
    """fused: the last layer of the model computes the loss, a part of the tokens at a time, so that all logits never
    exist at once. plain: the model returns logits. auto: fused wherever a rank has the whole layer (no tp, no pp)."""


class Recipe(Section):
    """A complete recipe: everything that `shoal train` needs, in eight sections.

    `shoal.config.load.load_recipe("recipe.yaml")` reads one. Files in recipes/ are complete ones.
    """

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optim: OptimSection = OptimSection()
    plan: PlanField = Plan()
    """The parallel layout: words such as `dp_replicate=2 mb=4 bf16`, or the same as keys. With the word `auto`, the
    planner fills in all open values."""
    launch: LaunchSection = LaunchSection()
    checkpoint: CheckpointSection = CheckpointSection()
    comm: CommSection = CommSection()
    run: RunSection = RunSection()
