"""The input of the planner: a model, a cluster, a batch, and the words that every plan must have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from shoal.blueprint.plan import DEGREES, VIRTUAL_STAGES, Plan
from shoal.blueprint.plan_conflicts import check_conflicts
from shoal.blueprint.plan_parser import read_mapping, read_words
from shoal.blueprint.validation.bf16_weights import check_bf16_weights
from shoal.blueprint.validation.unsupported import check_unsupported
from shoal.config.parse_units import size_in_bytes
from shoal.errors import Findings, Problem, ShoalError, raise_if
from shoal.planner.suggestions import AS_OPTIONS, check_axes
from shoal.planner.task import Task
from shoal.predict.cluster import Cluster
from shoal.predict.cluster_parser import parse_cluster
from shoal.predict.huggingface_config import NoDimensions
from shoal.predict.presets.frameworks import shoal_profile
from shoal.predict.presets.models import find_model
from shoal.predict.workload import Workload

BATCH_TOKENS = 2**22
"""Default tokens of a global batch; an assumption, and the answer says so."""
BATCH_SAMPLES = 256
"""Default samples per device, for a model that does not take tokens; an assumption, as above."""
LONGEST = 8192
"""The longest default sequence, for a model that would take a longer one; an assumption, as above."""
OPTIONS = {
    "--data.global_batch": "--global-batch",
    "--data.seq_len": "--seq-len",
    "--optim.param_dtype": "--param-dtype",
    "--optim.state_dtype": "--state-dtype",
    "--run.compile true": "leave it out: plans are compiled unless --eager is given",
    "--launch.nproc 2": "--cluster h200:2",
}
"""Settings of a recipe → the options of `shoal plan` for them."""
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

    lora: int | None = None
    """Rank of the adapters on every linear layer of the blocks; all other weights are frozen. None: all are trained."""

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

    mtbf: str | None = None
    """Mean time between faults of one device, such as 50000h: adds the part of its time that a run trains, and what
    would make it lose less."""

    spares: int = 0
    """Hosts that wait for another to fail (with --mtbf)."""

    repair: str = "24h"
    """Until a lost host is back (with --mtbf)."""

    restart: str | None = None
    """From a fault to the next step, such as 30sec (with --mtbf). None: 60 s and 8.5 ms for each device, which is a
    line through published restarts."""

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
    form: Mapping[str, Any] = field(default_factory=dict)
    """What dimensions alone do not say of a model without a name: fields of `Workload`."""

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
    found = Findings()
    cluster = found.of(parse_cluster, request.cluster)
    workload = found.of(workload_of, request)
    required, problems = read_required(request)
    numbers = check_numbers(request, cluster)
    found += [*problems, *numbers]
    if cluster is None or workload is None or numbers:
        raise ShoalError(*found.problems)
    if request.price is not None:
        cluster = replace(cluster, price=request.price)
    usual = min(workload.sequence or 4096, LONGEST) if workload.is_transformer else max(1, workload.sequence)
    sequence = usual if request.seq_len is None else request.seq_len
    batch = _usual_batch(cluster, workload, sequence) if request.global_batch is None else request.global_batch
    task = Task(
        workload=workload,
        cluster=cluster,
        sequence=sequence,
        global_batch=batch,
        profile=shoal_profile(
            compile=not request.eager, state_dtype=request.state_dtype, param_dtype=request.param_dtype
        ),
        compiles=not request.eager,
        max_memory=None if request.max_memory is None else size_in_bytes(request.max_memory),
    )
    if found.problems:
        found += check_axes(task, Plan.of(required), AS_OPTIONS)
        raise ShoalError(*found.problems)
    return task


def check_numbers(request: PlanRequest, cluster: Cluster | None) -> list[Problem]:
    """Problems of the numbers of a request. `cluster` None: it could not be read."""
    found = Findings()
    for name, value in (
        ("--seq-len", request.seq_len),
        ("--global-batch", request.global_batch),
        ("--top", request.top),
        ("--lora", request.lora),
        *((f"--{name.replace('_', '-')}", getattr(request, name) or None) for name in DIMENSIONS),  # 0: none of them
    ):
        if value is not None and value < 1:
            found += [Problem("Q001", f"{name} {value} is not a number of at least 1", f"{name} 1 or more")]
    if request.price is not None and request.price < 0:
        found += [Problem("Q001", f"--price {request.price} is below 0", "--price 2.5, for one device and one hour")]
    if (request.learning_rate is None) != (request.base_batch is None):
        what = "--learning-rate and --base-batch must be given together"
        found += [Problem("Q002", what, "--learning-rate 3e-4 --base-batch 256")]
    limit = None if request.max_memory is None else found.of(size_in_bytes, request.max_memory)
    if limit is not None and cluster is not None and limit > (there := cluster.device.memory):
        what = f"--max-memory {request.max_memory}, and a {cluster.device.name} has {there / 2**30:.1f} GiB"
        found += [Problem("Q003", what, f"--max-memory {there * 0.95 / 2**30:.0f}GiB or less")]
    return found.problems


def _usual_batch(cluster: Cluster, workload: Workload, sequence: int) -> int:
    """Return about 4 million tokens, in samples that divide over all devices; or `BATCH_SAMPLES` per device."""
    devices = cluster.num_devices
    each = BATCH_TOKENS // max(1, sequence) // devices if workload.is_transformer else BATCH_SAMPLES
    return devices * max(1, each)


def workload_of(request: PlanRequest) -> Workload:
    """Return the model, with LoRA if --lora is given."""
    found = _workload_of(request)
    if not request.lora:
        return found
    if not found.is_transformer:
        what = f"{found.name} is traced, and --lora is for models of known dimensions"
        raise ShoalError(what, fix="leave --lora out: what full training takes is more", code="Q005")
    return found.resized(lora=request.lora)


def _workload_of(request: PlanRequest) -> Workload:
    """A preset with changed dimensions, dimensions alone, or a traced module."""
    given = {name: getattr(request, name) for name in DIMENSIONS if getattr(request, name) is not None}
    if request.model is None:
        missing = [name for name in ("hidden", "layers", "heads") if name not in given]
        if missing:
            raise ShoalError(
                f"which model? Its name, or at least its {', '.join(missing)}",
                fix="shoal plan llama3-8b ..., or --hidden 4096 --layers 32 --heads 32",
                code="Q004",
            )
        return Workload(name="a model of these dimensions", **{"vocabulary": 32000, **request.form, **given})
    if ".py" in request.model and not request.model.startswith("hf:"):
        if given:
            raise ShoalError(
                f"{request.model} is traced, and --{next(iter(given))} is for dimensions",
                fix=f"shoal plan {request.model}, without --{next(iter(given))}",
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
    try:
        named = find_model(request.model)
    except NoDimensions as why:
        if given:
            raise
        named = _traced(request.model, why, request)
    if given and not named.is_transformer:
        what = f"{request.model} is no transformer, and --{next(iter(given))} is a dimension of one"
        raise ShoalError(what, fix=f"shoal plan {request.model}, without --{next(iter(given))}", code="Q005")
    return named.resized(**given) if given else named


def _traced(model: str, why: NoDimensions, request: PlanRequest) -> Workload:
    """A model of transformers whose config does not show its costs."""
    trace = import_module("shoal.train.trace.pretrained_trace")  # as above
    precision = required_of(request)["precision"]
    traced: Workload = trace.workload_of_folder(model, why, sequence=request.seq_len, precision=precision)
    return traced


def required_of(request: PlanRequest) -> dict[str, Any]:
    """Return the words that every plan must have, as keys and values."""
    required, problems = read_required(request)
    raise_if(problems)
    return required


def read_required(request: PlanRequest) -> tuple[dict[str, Any], list[Problem]]:
    """Return the words that could be read, and the problems of all."""
    own = {name: getattr(request, name) for name in (*WORDS, "precision")}
    given = {name: value for name, value in own.items() if value is not None}
    found, read = Findings(), read_words(request.plan)
    found += [replace(problem, fix=as_options(problem.fix)) for problem in read.problems]
    for name, value in given.items():
        if read.values.get(name, value) != value:
            what = f"{name} is given twice: {read.values[name]} in --plan, and --{name} {value}"
            others = Plan.of({key: other for key, other in read.values.items() if key != name})
            found += [Problem("Q006", what, f'--plan "{others}"')]
    of_options = read_mapping(given)
    found += of_options.problems
    required = {**read.values, **of_options.values}
    if "precision" not in read.unread | of_options.unread:
        required.setdefault("precision", _usual_precision(request.cluster))
    found += _check_words(Plan.of(required), request)
    return required, found.problems


def as_options(fix: str) -> str:
    """A fix in settings of a recipe, in options of `shoal plan`.

    >>> as_options("--data.global_batch 32"), as_options("--run.loss fused"), as_options("tp=2")
    ('--global-batch 32', 'leave it out: the prediction has no --run.loss fused', 'tp=2')
    """
    for setting, option in OPTIONS.items():
        fix = fix.replace(setting, option)
    return f"leave it out: the prediction has no {fix}" if fix.startswith(("--run.", "--launch.")) else fix


def _check_words(plan: Plan, request: PlanRequest) -> Iterator[Problem]:
    """Problems of words that exclude each other, whatever the planner chooses for the open ones."""
    degrees = {axis: getattr(plan, axis) or (1 if axis == "ep" else 2) for axis in DEGREES}
    if plan.dp_shard is None and plan.zero == 0:
        degrees["dp_shard"] = 1
    v = plan.v or VIRTUAL_STAGES.get(plan.schedule or "", 1 if plan.pp == 1 else 2)
    zero = 3 if plan.zero is None else plan.zero
    filled = Plan.of({**plan.to_mapping(), **degrees, "zero": zero, "v": v})
    yield from check_conflicts(filled, unknown="dp_shard" if plan.dp_shard is None else None)
    yield from check_unsupported(plan)
    if request.param_dtype == "bf16":
        yield from check_bf16_weights(plan, weights="--param-dtype fp32", precision="--precision bf16")


def _usual_precision(name: str) -> str:
    try:
        cluster = parse_cluster(name)
    except ShoalError:  # which `task_of` reports
        return "bf16"
    words = ("fp32",) if cluster.device.is_host else ("bf16", "fp16", "fp32")
    return next(word for word in words if word in cluster.device.achievable or word == "fp32")
