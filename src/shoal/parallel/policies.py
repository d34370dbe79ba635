"""The settings of a run, as four frozen policies. A setting has one name: recipe key, argument of `Run`, field here.

    recipe    optim.clip ┐                                      ┌ StepPolicy      what is done with gradients
              run.fp8    ├─ settings_of(recipe) ─┐              │
              comm.*     ┘                       ├─ Policies ───┼ ComputePolicy   how the model is computed
    script    Run(clip=1.0, fp8="rowwise") ──────┘              ├ SyncPolicy      how replicas exchange gradients
                                                                └ ShardPolicy     how shards are gathered and reduced

CONTRIBUTING.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from inspect import cleandoc
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch

from shoal.comm.replicas.transport import Chosen
from shoal.config.checks.arguments import BOTH, check_choice, check_number, check_whole
from shoal.errors import Problem, listed, raise_if
from shoal.numerics.fp8.convert import FromHead, Scaling
from shoal.numerics.ops.attention_kernels import Backend
from shoal.numerics.precision import Weights
from shoal.parallel.data.diloco import DEFAULT_OUTER, OuterOptimizer
from shoal.parallel.data.shard_policy import DEFAULT_SHARDING, ReduceDtype, ShardPolicy
from shoal.safe_parsing import short

Algorithm = Chosen | Literal["auto"]
BucketSize = float | Literal["auto"] | None
OnNan = Literal["stop", "skip", "ignore"]
LossMean = Literal["global", "microbatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPolicy:
    """Settings of gradients and updates.

    clip              the largest global gradient norm; None: no clipping
    on_nan            when a gradient is not finite: "stop" the run, "skip" the update, or "ignore" it
    ema               the decay of a moving average of the weights, `run.ema`, which each update changes; None: none
    check_replicas    steps between two comparisons of the checksums of all tensors that several ranks hold; a flipped
                      bit ends the run, with its tensor and rank; 0: never
    check_compute     steps between two in which each rank computes the gradients of another one, too; a rank that
                      computes wrong is named; 0: never
    loss_scale        the first loss scale under fp16
    loss_scale_window steps without overflow after which the loss scale is doubled
    loss_mean         "global": the mean over all labels of the global batch; "microbatch": the mean of the means of
                      microbatches and ranks, as DeepSpeed and DDP have it, whatever each of them counts
    """

    clip: float | None = None
    on_nan: OnNan = "stop"
    ema: float | None = None
    check_replicas: int = 0
    check_compute: int = 0
    loss_scale: float = 65536.0
    loss_scale_window: int = 2000
    loss_mean: LossMean = "global"

    def problems(self) -> Iterator[Problem]:
        """Find values that would not do what is meant. A negative norm, for example, climbs."""
        yield from check_choice("on_nan", self.on_nan, get_args(OnNan))
        yield from check_choice("loss_mean", self.loss_mean, get_args(LossMean))
        if self.clip is not None:
            yield from check_number("clip", self.clip, above=0, usual=None if self.clip == 0 else 1.0)
        if self.ema is not None and not (isinstance(self.ema, float) and 0.0 <= self.ema < 1.0):
            yield Problem("T052", f"ema must be a number from 0 to below 1, got {short(self.ema)}", "ema=0.999")
        yield from check_whole("check_replicas", self.check_replicas, least=0, usual=100)
        yield from check_whole("check_compute", self.check_compute, least=0, usual=100)
        yield from check_number("loss_scale", self.loss_scale, above=0, usual=65536.0)
        yield from check_number("loss_scale_window", self.loss_scale_window, above=0, usual=2000)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePolicy:
    """Settings of the forward and the backward.

    seed              decides the initial weights, the order of the samples and all randomness in the model
    deterministic     the same bits again on the same layout
    param_dtype       the dtype of parameters and gradients: fp32; or bf16, under the precisions bf16 and fp8, with an
                      optimizer that rounds stochastically, such as shoal.AdamW
    compile           run each block of the model under torch.compile; a string is the backend to use
    attention         the kernel of attention on a GPU: auto (the fastest), fa4, cudnn, flash, efficient, math
    fused_loss        compute the loss inside the model's last layer, without holding all logits; None: where it can
    fused_layers      swap layers of transformers for those that save less and are faster; None: on a GPU
    fp8               under the precision fp8, the part of a tensor that shares one scale: tensorwise or rowwise
    fp8_min_features  under fp8, layers with fewer features than this stay in bf16; None: 512
    fp8_head          under fp8, "gradients": the fused loss computes its gradients in fp8, never its logits; or "none"
    recompute_swiglu  recompute the gated values of a feed-forward in the backward; False: store them, which is faster
    sync_batch_norm   batch norm normalises with the statistics of a microbatch over all ranks, not of each rank's part
    """

    seed: int = 0
    deterministic: bool = False
    param_dtype: Weights = "fp32"
    compile: bool | str = False
    attention: Backend = "auto"
    fused_loss: bool | None = None
    fused_layers: bool | None = None
    fp8: Scaling = "tensorwise"
    fp8_min_features: int | None = None
    fp8_head: FromHead = "gradients"
    recompute_swiglu: bool = True
    sync_batch_norm: bool = False

    def problems(self) -> Iterator[Problem]:
        """Find values that do not exist."""
        allowed = {
            "deterministic": BOTH,
            "param_dtype": get_args(Weights),
            "attention": get_args(Backend),
            "fused_loss": (None, *BOTH),
            "fused_layers": (None, *BOTH),
            "fp8": get_args(Scaling),
            "fp8_head": get_args(FromHead),
            "sync_batch_norm": BOTH,
            "recompute_swiglu": BOTH,
        }
        yield from check_whole("seed", self.seed, usual=0)
        for name, values in allowed.items():
            yield from check_choice(name, getattr(self, name), values)
        if self.fp8_min_features is not None:
            yield from check_whole("fp8_min_features", self.fp8_min_features, least=1, usual=512)
        compiles = self.compile
        is_backend = compiles in torch.compiler.list_backends(exclude_tags=()) if isinstance(compiles, str) else False
        if not (is_backend or compiles is None or isinstance(compiles, bool) or callable(compiles)):
            known = listed(map(repr, torch.compiler.list_backends()))  # but for those that are for debugging
            what = f"compile must be True, False or a backend of torch.compile ({known}), got {short(compiles)}"
            yield Problem("R047", what, "compile=True")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncPolicy:
    """Settings of the communication between replicas.

    bucket_mb               size of the buckets in which gradients are reduced; None: 25, and 1 for the first; "auto":
                            measured
    find_unused_parameters  parameters may be without a gradient in some steps
    algorithm               what carries gradients between replicas: builtin (torch's own), ring, tree, double_tree,
                            halving, hierarchical or naive; auto: the fastest here, measured when the model is prepared
    warmup_steps            how many of the first steps send gradients as they are under compress= and sync=; None: as
                            the method needs
    outer                   under sync=, the optimizer of the shared weights: shoal.OuterOptimizer(lr=0.7, momentum=0.9,
                            fragments=1, delay=0, rescale=True)
    """

    bucket_mb: BucketSize = None
    find_unused_parameters: bool = False
    algorithm: Algorithm = "builtin"
    warmup_steps: int | None = None
    outer: OuterOptimizer = DEFAULT_OUTER

    def problems(self) -> Iterator[Problem]:
        """Find values that do not exist; also where one rank alone never reads them: a script is tried there first."""
        algorithms = tuple(word for kind in get_args(Algorithm) for word in get_args(kind))
        yield from check_choice("find_unused_parameters", self.find_unused_parameters, BOTH)
        yield from check_choice("algorithm", self.algorithm, algorithms)
        if self.bucket_mb is not None and self.bucket_mb != "auto":
            yield from check_number("bucket_mb", self.bucket_mb, above=0, usual=25)
        if self.warmup_steps is not None:
            yield from check_whole("warmup_steps", self.warmup_steps, least=0, usual=0)
        outer: Any = self.outer
        if isinstance(outer, OuterOptimizer):
            yield from outer.problems()
        else:
            what = f"outer must be an OuterOptimizer, got {short(outer)}"
            yield Problem("R047", what, "outer=shoal.OuterOptimizer(lr=0.7, momentum=0.9)")


class Settings(TypedDict, total=False):
    """The fields of all policies, for type checkers: the keyword arguments of `Run`."""

    clip: float | None
    on_nan: OnNan
    ema: float | None
    check_replicas: int
    check_compute: int
    loss_scale: float
    loss_scale_window: int
    loss_mean: LossMean
    seed: int
    deterministic: bool
    param_dtype: Weights
    compile: bool | str
    attention: Backend
    fused_loss: bool | None
    fused_layers: bool | None
    fp8: Scaling
    fp8_min_features: int | None
    fp8_head: FromHead
    recompute_swiglu: bool
    sync_batch_norm: bool
    bucket_mb: BucketSize
    find_unused_parameters: bool
    algorithm: Algorithm
    warmup_steps: int | None
    outer: OuterOptimizer
    wrap_classes: tuple[str, ...]
    wrap_min_params: int | None
    forward_prefetch: int | None
    backward_prefetch: int | None
    reduce_dtype: ReduceDtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """All settings of a run, checked."""

    step: StepPolicy = StepPolicy()
    compute: ComputePolicy = ComputePolicy()
    sync: SyncPolicy = SyncPolicy()
    shard: ShardPolicy = DEFAULT_SHARDING

    @classmethod
    def of(cls, **settings: Unpack[Settings]) -> Policies:
        """Each setting in the policy that has it. Raise with all wrong values at once."""
        step, compute, sync, shard = several = [kind(**_of(kind, settings)) for kind in KINDS]
        raise_if([problem for policy in several for problem in policy.problems()], title="the options of a run")
        return cls(step=step, compute=compute, sync=sync, shard=shard)


KINDS: tuple[Any, ...] = (StepPolicy, ComputePolicy, SyncPolicy, ShardPolicy)


def setting_names() -> list[str]:
    """The settings of all policies."""
    return [field.name for kind in KINDS for field in fields(kind)]


def settings_help() -> str:
    """All settings, each with its meaning."""
    return "\n\n".join(cleandoc(kind.__doc__) for kind in KINDS)


def _of(policy: Any, settings: Settings) -> dict[str, Any]:
    """The settings that are fields of a policy."""
    known = {field.name for field in fields(policy)}
    return {name: value for name, value in settings.items() if name in known}
