"""Settings of FSDP2, as FSDP names them: units, prefetch and the dtype of reductions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from shoal.config.checks.arguments import check_choice, check_whole
from shoal.errors import Problem, listed
from shoal.safe_parsing import short

ReduceDtype = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPolicy:
    """Settings of FSDP2, which gathers and reduces under zero=1 to zero=3.

    wrap_classes       names of classes, such as ("LlamaDecoderLayer",): each module of one is gathered as one unit, and
                       all else with the model's root; (): units are the blocks of the model
    wrap_min_params    gather submodules as units that have at least this many parameters outside of smaller units;
                       None: units are the blocks of the model
    forward_prefetch   units that a forward gathers ahead, before it computes one; None: the next is gathered while a
                       GPU computes, if the host runs ahead
    backward_prefetch  under zero=3, units that a backward gathers ahead; None: one
    reduce_dtype       the dtype in which gradients are reduced over shards: fp32 (under fp64, fp64), or bf16, which
                       rounds them and halves their messages
    """

    wrap_classes: tuple[str, ...] = ()
    wrap_min_params: int | None = None
    forward_prefetch: int | None = None
    backward_prefetch: int | None = None
    reduce_dtype: ReduceDtype = "fp32"

    @property
    def wraps(self) -> bool:
        """Whether units are chosen here, not by the model's description."""
        return bool(self.wrap_classes) or self.wrap_min_params is not None

    def problems(self) -> Iterator[Problem]:
        """Find values that do not exist; also where one rank alone never reads them."""
        yield from check_choice("reduce_dtype", self.reduce_dtype, get_args(ReduceDtype))
        for name in ("wrap_min_params", "forward_prefetch", "backward_prefetch"):
            if (value := getattr(self, name)) is not None:
                yield from check_whole(name, value, least=1, usual=10**8 if name == "wrap_min_params" else 2)
        classes: Any = self.wrap_classes
        if not isinstance(classes, tuple) or not all(isinstance(one, str) and one for one in classes):
            what = f"wrap_classes must be a tuple of names of classes, got {short(classes)}"
            yield Problem("R047", what, f"wrap_classes={_class_names(classes)!r}")
        elif classes and self.wrap_min_params is not None:
            what = f"units are chosen by class or by size, got wrap_classes {listed(map(repr, classes))} and"
            yield Problem(
                "R075", f"{what} wrap_min_params {self.wrap_min_params:,}", "wrap_min_params=None, or wrap_classes=()"
            )


DEFAULT_SHARDING = ShardPolicy()


def _class_names(given: Any) -> tuple[str, ...]:
    """Names that were probably meant by one name, one class, or a list of either."""
    several = given if isinstance(given, list | tuple | set) else (given,)
    names = (one if isinstance(one, str) else getattr(one, "__name__", None) for one in several)
    return tuple(name for name in names if name) or ("LlamaDecoderLayer",)
