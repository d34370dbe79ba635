"""The input of the planner: a model, a cluster, a batch, and the words that every plan must have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

from shoal.blueprint.plan import Plan
from shoal.blueprint.plan_parser import parse_words
from shoal.blueprint.validation.bf16_weights import reject_bf16_weights
from shoal.config.parse_units import size_in_bytes
from shoal.errors import Problem, ShoalError, raise_if
from shoal.planner.task import Task
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.presets.frameworks import shoal_profile
from shoal.predict.presets.models import find_model
from shoal.predict.workload import Workload

BATCH_TOKENS = 2**22
"""Default tokens of a global batch; an assumption, and the answer says so."""
BATCH_SAMPLES = 256
"""Default samples per device, for a model that does not take tokens; an assumption, as above."""
LONGEST = 8192
"""The longest default sequence, for a model that would take a longer one; an assumption, as above."""
DIMENSIONS = ("hidden", "layers", "heads", "kv_heads", "ffn", "vocabulary", "experts", "top_k", "expert_ffn")
WORDS = ("tp", "pp", "cp", "ep", "dp_shard", "dp_replicate", "zero", "mb", "recompute", "schedule", "v", "offload")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A model, a cluster, and the words that every plan must have."""

    model: str | None = None
    """A preset (llama3-8b, mixtral-8x7b, ...), a Hugging Face config.json, or file.py:function. None: the dimensions
    below."""

    cluster: str = "here"
    """A preset with its size (h100:8x16 are 16 nodes of 8), a YAML file, or here: what `shoal calibrate`
    has measured. The last two take a size as well: here:4, lab.yaml:8x2."""

    seq_len: int | None = None
    """Tokens of a sample. None: as many as the model takes, at most 8192."""

    global_batch: int | None = None
    """Samples of a step, over all devices. None: about 4 million tokens, or 256 images and the like on each device."""

    plan: str = ""
    """Words that every plan must have: "tp=8 zero=1 bf16". The same words have options of their own below."""

    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp_shard: int | None = None
    dp_replicate: int | None = None
    zero: int | None = None
    mb: int | None = None
    recompute: Literal["none", "selective", "full"] | None = None
    schedule: str | None = None
    v: int | None = None
    offload: Literal["none", "optimizer", "parameters"] | None = None
    precision: str | None = None
    """None: bf16 on a GPU that has it, fp32 on a CPU."""

    max_memory: str | None = None
    """Memory of a device that may be used, such as 70GiB, or 70 for short. None: 95 % of it."""

    state_dtype: Literal["fp32", "bf16"] = "fp32"
    """What AdamW keeps its moments in."""

    param_dtype: Literal["fp32", "bf16"] = "fp32"
    """What parameters and gradients are kept in."""

    eager: bool = False
    """Without torch.compile."""

    by: Literal["time", "memory", "money"] = "time"
    """What the best has least of. money: fewer devices are tried, too."""

    top: int = 5
    """Plans to show."""

    explain: bool = False
    """Walk from one device to the best plan, with what each move buys; laws of scaling; more devices and fewer."""

    tokens: str | None = None
    """Tokens of the whole run, such as 15T: adds its days, device-hours and cost."""

    price: float | None = None
    """Money for one device and one hour."""

    learning_rate: float | None = None
    """A learning rate that suits batches of --base-batch samples. A warning follows where the global batch is at least
    twice or at most half of that."""

    base_batch: int | None = None
    """Samples of a step for which --learning-rate was chosen."""

    hidden: int | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocabulary: int | None = None
    experts: int | None = None
    top_k: int | None = None
    expert_ffn: int | None = None

    def task(self) -> Task:
        """Return the model, the cluster and the batch that they name."""
        return task_of(self)

    def required(self) -> dict[str, Any]:
        """Return the keys and values that every plan must have."""
        return required_of(self)

    def limits(self) -> tuple[str, ...]:
        """Return the names of the options that limit which plans there are."""
        return tuple(name for name in ("plan", *WORDS) if getattr(self, name) not in (None, ""))


def task_of(request: PlanRequest) -> Task:
    """Build the task from a request."""
    cluster = parse_cluster(request.cluster)
    if request.price is not None:
        cluster = replace(cluster, price=request.price)
    workload = workload_of(request)
    usual = min(workload.sequence or 4096, LONGEST) if workload.is_transformer else 1
    sequence = usual if request.seq_len is None else request.seq_len
    batch = _usual_batch(cluster, workload, sequence) if request.global_batch is None else request.global_batch
    raise_if(
        Problem("Q001", f"{name} {value} is not a number of at least 1", f"{name} 1 or more")
        for name, value in (("--seq-len", sequence), ("--global-batch", batch), ("--top", request.top))
        if value < 1
    )
    if request.price is not None and request.price < 0:
        raise ShoalError(
            f"--price {request.price} is below 0", fix="--price 2.5, for one device and one hour", code="Q001"
        )
    if (request.learning_rate is None) != (request.base_batch is None):
        raise ShoalError(
            "--learning-rate and --base-batch must be given together",
            fix="--learning-rate 3e-4 --base-batch 256",
            code="Q002",
        )
    return Task(
        workload=workload,
        cluster=cluster,
        sequence=sequence,
        global_batch=batch,
        profile=shoal_profile(
            compile=not request.eager, state_dtype=request.state_dtype, param_dtype=request.param_dtype
        ),
        compiles=not request.eager,
        max_memory=None if request.max_memory is None else _memory_limit(request.max_memory, cluster),
    )


def _memory_limit(text: str, cluster: Cluster) -> float:
    limit, there = size_in_bytes(text), cluster.device.memory
    if limit > there:
        what = f"--max-memory {text}, and a {cluster.device.name} has {there / 2**30:.1f} GiB"
        raise ShoalError(what, fix=f"--max-memory {there * 0.95 / 2**30:.0f}GiB or less", code="Q003")
    return limit


def _usual_batch(cluster: Cluster, workload: Workload, sequence: int) -> int:
    """Return about 4 million tokens, in samples that divide over all devices; or `BATCH_SAMPLES` per device."""
    devices = cluster.num_devices
    each = BATCH_TOKENS // max(1, sequence) // devices if workload.is_transformer else BATCH_SAMPLES
    return devices * max(1, each)


def workload_of(request: PlanRequest) -> Workload:
    """Return the model: a preset with changed dimensions, dimensions alone, or a traced module."""
    given = {name: getattr(request, name) for name in DIMENSIONS if getattr(request, name) is not None}
    if request.model is None:
        missing = [name for name in ("hidden", "layers", "heads") if name not in given]
        if missing:
            raise ShoalError(
                f"which model? Its name, or at least its {', '.join(missing)}",
                fix="shoal plan llama3-8b ..., or --hidden 4096 --layers 32 --heads 32",
                code="Q004",
            )
        return Workload(name="a model of these dimensions", **{"vocabulary": 32000, **given})
    if ".py" in request.model:
        if given:
            raise ShoalError(
                f"{request.model} is traced, and --{next(iter(given))} is for dimensions",
                fix="leave it out",
                code="Q005",
            )
        if ":" not in request.model:
            raise ShoalError(
                f"{request.model} is a file: which function of it?", fix=f"{request.model}:function", code="Q004"
            )
        trace = import_module("shoal.train.trace.model_trace")  # by its name: only a traced model needs torch
        model, inputs = trace.load(request.model, sequence=request.seq_len)
        precision = required_of(request)["precision"]
        traced: Workload = trace.workload_of(model, inputs, name=request.model, precision=precision)
        return traced
    named = find_model(request.model)
    if given and not named.is_transformer:
        what = f"{request.model} is no transformer, and --{next(iter(given))} is a dimension of one"
        raise ShoalError(what, fix="leave it out", code="Q005")
    return named.resized(**given) if given else named


def required_of(request: PlanRequest) -> dict[str, Any]:
    """Return the words that every plan must have, as keys and values."""
    own = {name: getattr(request, name) for name in (*WORDS, "precision")}
    given = {name: value for name, value in own.items() if value is not None}
    words = parse_words(request.plan)
    raise_if(
        Problem(
            "Q006",
            f"{name} is given twice: {words[name]} in --plan, and --{name} {given[name]}",
            "leave one of them out",
        )
        for name in given
        if name in words and words[name] != given[name]
    )
    required = {**words, **given}
    required.setdefault("precision", _usual_precision(parse_cluster(request.cluster)))
    plan = Plan.of(required)  # rejects contradictions
    if request.param_dtype == "bf16":
        reject_bf16_weights(plan, weights="--param-dtype fp32", precision="--precision bf16")
    return required


def _usual_precision(cluster: Cluster) -> str:
    words = ("fp32",) if cluster.device.is_host else ("bf16", "fp16", "fp32")
    return next(word for word in words if word in cluster.device.achievable or word == "fp32")
