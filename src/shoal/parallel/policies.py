"""The settings of a run, as three frozen policies. A setting has one name: recipe key, argument of `Run`, field here.

    recipe    optim.clip ┐                                      ┌ StepPolicy      what is done with gradients
              run.fp8    ├─ settings_of(recipe) ─┐              │
              comm.*     ┘                       ├─ Policies ───┼ ComputePolicy   how the model is computed
    script    Run(clip=1.0, fp8="rowwise") ──────┘              └ SyncPolicy      how replicas exchange gradients

CONTRIBUTING.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from inspect import cleandoc
from numbers import Real
from typing import Any, Literal, TypedDict, Unpack, get_args

import torch

from shoal.comm.replicas.transport import Chosen
from shoal.errors import Problem, listed, raise_if
from shoal.numerics.fp8.convert import FromHead, Scaling
from shoal.numerics.precision import Weights
from shoal.parallel.context.attention import Backend
from shoal.parallel.data.local_sgd import DEFAULT_OUTER, OuterOptimizer

Algorithm = Chosen | Literal["auto"]
BucketSize = float | Literal["auto"] | None
OnNan = Literal["stop", "skip", "ignore"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPolicy:
    """Settings of gradients and updates.

    clip              the largest global gradient norm; None: no clipping
    on_nan            when a gradient is not finite: "stop" the run, "skip" the update, or "ignore" it
    check_replicas    steps between two comparisons of the checksums of all tensors that several ranks hold; a flipped
                      bit ends the run, with its tensor and rank; 0: never
    loss_scale        the first loss scale under fp16
    loss_scale_window steps without overflow after which the loss scale is doubled
    """

    clip: float | None = None
    on_nan: OnNan = "stop"
    check_replicas: int = 0
    loss_scale: float = 65536.0
    loss_scale_window: int = 2000

    def problems(self) -> Iterator[Problem]:
        """Values that would not do what is meant: a negative norm, say, climbs."""
        yield from _not_among(self, {"on_nan": get_args(OnNan)})
        if self.clip is not None and not _is_above_zero(self.clip):
            fix = "clip=1.0, the largest norm of gradients; or clip=None, to leave them alone"
            yield Problem("R048", f"clip is {self.clip!r}", fix)
        for name, usual in (("loss_scale", 65536.0), ("loss_scale_window", 2000)):
            if not _is_above_zero(getattr(self, name)):
                yield Problem(
                    "R048", f"{name} is {getattr(self, name)!r}", f"{name}={usual}, or another number above 0"
                )
        if type(self.check_replicas) is not int or self.check_replicas < 0:  # True is an int, too
            yield Problem(
                "R048", f"check_replicas is {self.check_replicas!r}", "check_replicas=100, a number of steps; 0: never"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePolicy:
    """Settings of the forward and the backward.

    seed              decides the initial weights, the order of the samples and all randomness in the model
    deterministic     the same bits again on the same layout
    param_dtype       the dtype of parameters and gradients: fp32; or bf16, under the precisions bf16 and fp8, with an
                      optimizer that rounds stochastically, such as shoal.AdamW
    compile           run each block of the model under torch.compile; a string is the backend to use
    attention         the kernel of attention on a GPU: auto (the fastest), cudnn, flash, efficient or math
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
        """Values that do not exist."""
        allowed = {
            "param_dtype": get_args(Weights),
            "attention": get_args(Backend),
            "fused_loss": (None, *_BOTH),
            "fused_layers": (None, *_BOTH),
            "fp8": get_args(Scaling),
            "fp8_head": get_args(FromHead),
            "sync_batch_norm": _BOTH,
            "recompute_swiglu": _BOTH,
        }
        yield from _not_among(self, allowed)
        least = self.fp8_min_features
        if least is not None and not (type(least) is int and least > 0):  # True is an int, too
            yield Problem(
                "R048",
                f"fp8_min_features is {least!r}",
                "fp8_min_features=512, or whatever number of features is the least",
            )
        compiles = self.compile
        is_backend = compiles in torch.compiler.list_backends(exclude_tags=()) if isinstance(compiles, str) else False
        if not (is_backend or compiles is None or isinstance(compiles, bool) or callable(compiles)):
            known = listed(map(repr, torch.compiler.list_backends()))  # but for those that are for debugging
            yield Problem("R047", f"compile is {compiles!r}", f"compile=True; or a backend of torch.compile: {known}")


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
        """Values that do not exist; also where one rank alone never reads them, since a script is tried there first."""
        algorithms = tuple(word for kind in get_args(Algorithm) for word in get_args(kind))
        yield from _not_among(self, {"find_unused_parameters": _BOTH, "algorithm": algorithms})
        size: Any = self.bucket_mb
        if size not in (None, "auto") and not (isinstance(size, Real) and float(size) > 0):
            yield Problem("R048", f"bucket_mb is {size!r}", "bucket_mb=25, or whatever size in MB; 'auto'; None")
        steps = self.warmup_steps
        if steps is not None and not (isinstance(steps, int) and steps >= 0):
            yield Problem("R048", f"warmup_steps is {steps!r}", "warmup_steps=0, or whatever number of steps; None")
        outer: Any = self.outer
        if not isinstance(outer, OuterOptimizer):
            yield Problem("R047", f"outer is {outer!r}", "outer=shoal.OuterOptimizer(lr=0.7, momentum=0.9)")


class Settings(TypedDict, total=False):
    """The fields of all policies, for type checkers: the keyword arguments of `Run`."""

    clip: float | None
    on_nan: OnNan
    check_replicas: int
    loss_scale: float
    loss_scale_window: int
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """All settings of a run, checked."""

    step: StepPolicy = StepPolicy()
    compute: ComputePolicy = ComputePolicy()
    sync: SyncPolicy = SyncPolicy()

    @classmethod
    def of(cls, **settings: Unpack[Settings]) -> Policies:
        """Each setting in the policy that has it. Raise with all wrong values at once."""
        step, compute, sync = (kind(**_of(kind, settings)) for kind in KINDS)
        raise_if([*step.problems(), *compute.problems(), *sync.problems()], title="the options of a run")
        return cls(step=step, compute=compute, sync=sync)


KINDS: tuple[Any, ...] = (StepPolicy, ComputePolicy, SyncPolicy)


def setting_names() -> list[str]:
    """The settings of all policies."""
    return [field.name for kind in KINDS for field in fields(kind)]


def settings_help() -> str:
    """All settings, each with its meaning."""
    return "\n\n".join(cleandoc(kind.__doc__) for kind in KINDS)


_BOTH = (True, False)


def _of(policy: Any, settings: Settings) -> dict[str, Any]:
    """The settings that are fields of a policy."""
    known = {field.name for field in fields(policy)}
    return {name: value for name, value in settings.items() if name in known}


def _not_among(policy: object, allowed: dict[str, tuple[Any, ...]]) -> Iterable[Problem]:
    for name, values in allowed.items():
        value = getattr(policy, name)
        if value not in values:
            yield Problem("R047", f"{name} is {value!r}", f"{name}={listed(map(repr, values))}")


def _is_above_zero(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
