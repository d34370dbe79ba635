"""Make a model of transformers fit for a layout, in place: its attention, cache, masks, positions and layers."""

from __future__ import annotations

import copy
import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.blueprint.description import Description
from shoal.blueprint.placement import splits_tokens
from shoal.blueprint.plan import Plan
from shoal.errors import ShoalError
from shoal.models.huggingface import attention, experts
from shoal.models.huggingface.fast import swap_layers
from shoal.models.huggingface.label_shift import shift_of
from shoal.models.huggingface.long_rope import pass_last_position
from shoal.parallel.context.attention import positions_in_documents

MARK = "_is_adapted_for_shoal"
DOCUMENTS = "documents"
"""The entry of a batch with the document of each token."""


def adapt(model: Any, description: Description, plan: Plan | None, *, fused: bool = False) -> str | None:
    """Prepare a model for a plan; None: for a trace on the meta device. Names and parameters stay.

    Without pp, cp and divided tokens attention stays that of transformers. `fused`: swap in layers that compute the
    same faster, and return one line about them. Under tp no layer is swapped.
    """
    if getattr(model, MARK, None) is not None:
        return None
    if plan is not None:
        give_own_config(model)
    experts.install(model)
    divides_all = plan is not None and splits_tokens(plan, description) and not description.token_blocks
    divides = plan is None or plan.layout.cp > 1 or plan.layout.pp > 1 or divides_all
    is_able = "cp" not in description.why_not
    is_fused = fused and plan is not None and plan.layout.tp == 1
    before = getattr(model.config, "_attn_implementation", None)
    if is_able and (divides or (is_fused and before == "sdpa")):
        attention.install(model)
    context = 1 if plan is None else plan.layout.cp
    if context > 1:
        pass_last_position(model, context)
    takes = inspect.signature(model.forward).parameters
    inputs = Inputs(
        takes_cache="use_cache" in takes,
        needs_positions=divides_all and context == 1,
        checks_positions=divides and is_able,
        cp=context,
        divided_by=None if plan is None else _divided_by(plan, description),
        shifts_labels=context > 1 and _shifts_labels(model),
        why_not_packed=description.why_not.get("cp"),
        packed_attention=before if is_able and is_fused and not divides and before == "sdpa" else None,
    )
    model.register_forward_pre_hook(inputs, with_kwargs=True)
    setattr(model, MARK, True)
    return swap_layers(model, description.blocks) if is_fused else None


def give_own_config(model: Any) -> None:
    """Copy the config of a model, which will name other functions: a script may build another model from its own."""
    kind = sys.modules["transformers.configuration_utils"].PreTrainedConfig
    copied: dict[int, Any] = {}  # modules share configs and parts of them, and still do afterwards
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, kind):
                setattr(module, name, copy.deepcopy(value, copied))


@dataclass(frozen=True)
class Inputs:
    """Arguments of a forward that a model would choose otherwise. It has no reference to the model, so that a copied
    model keeps it."""

    takes_cache: bool
    needs_positions: bool
    checks_positions: bool
    cp: int
    divided_by: str | None = None
    """The word of the plan by which a rank has some of the tokens of a sequence, or some of the layers."""
    shifts_labels: bool = False
    """Whether the model's own loss, of the labels of some tokens, would lack those of the next ones."""
    why_not_packed: str | None = None
    """Why a token could see other documents of its sample; None: it cannot."""
    packed_attention: str | None = None
    """The attention for samples that may be packed, which transformers finds in position_ids; None: no other one."""

    def __call__(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Turn the cache off, which a recomputed block would fill twice; and pass positions where tokens are divided,
        since a model counts those that it sees."""
        if options.get(DOCUMENTS) is not None and self.why_not_packed is not None:
            raise ShoalError(
                f"packed samples cannot be kept apart in this model: {self.why_not_packed}",
                fix="--data.pack false",
                code="L016",
            )
        self._check_own_loss(model, options)
        if self.divided_by == "sp=on" and options.get("inputs_embeds") is not None:
            raise ShoalError(
                "sp=on divides the tokens behind the embedding, got inputs_embeds in the batch, which come after it",
                fix='"tp=... sp=off" in the plan (--plan.sp off)',
                code="M152",
            )
        options = with_positions(options)
        if self.takes_cache:
            options = {"use_cache": False, **options}
        positions = options.get("position_ids")
        is_plain = options.get("attention_mask") is None and options.get("past_key_values") is None
        if positions is not None and is_plain and self.checks_positions:  # else transformers does not look for packing
            self._check(positions)
        if self.packed_attention is not None:
            wanted = self.packed_attention if positions is not None and is_plain else attention.NAME
            if model.config._attn_implementation != wanted:
                model.set_attn_implementation(wanted)
        if positions is None and self.needs_positions:
            tokens = next((x for x in (*arguments, *options.values()) if isinstance(x, Tensor)), None)
            if tokens is not None:
                options = {**options, "position_ids": torch.arange(tokens.shape[1], device=tokens.device)[None]}
        return arguments, options

    def _check_own_loss(self, model: Any, options: dict[str, Any]) -> None:
        if self.shifts_labels and options.get("labels") is not None:
            raise ShoalError(
                f"the model shifts labels by one token, and {self.divided_by} gives a rank tokens whose next ones are"
                " on others: its own loss would leave labels out",
                fix="Run() without loss=, which shifts them before tokens are divided; or cp=1",
                code="M143",
            )
        wanted = options.get("output_router_logits")
        if self.divided_by is not None and (_returns_router_logits(model) if wanted is None else wanted):
            raise ShoalError(
                f"output_router_logits=True needs the routers of all layers and tokens on every rank, and"
                f" {self.divided_by} divides them",
                fix="model.config.output_router_logits = False; or cp=1, pp=1 and sp=off",
                code="M144",
            )

    def _check(self, positions: Tensor) -> None:
        if self.cp > 1:
            raise ShoalError(
                f"under cp={self.cp} positions are passed by shoal, got position_ids in the batch",
                fix="a batch without position_ids (--data.pack false)",
                code="M064",
            )
        if not positions.is_meta and not bool((positions.diff(dim=-1) == 1).all()):
            raise ShoalError(
                "position_ids must count up by one, got others, as of packed samples",
                fix="a batch without position_ids and with one document in each sample (--data.pack false), or cp=1,"
                " pp=1 and sp=off",
                code="M064",
            )


def _divided_by(plan: Plan, description: Description) -> str | None:
    for axis in ("cp", "pp"):
        if plan.layout.degree(axis) > 1:
            return f"{axis}={plan.layout.degree(axis)}"
    return "sp=on" if splits_tokens(plan, description) else None


def _shifts_labels(model: Any) -> bool:
    """Whether a model's own loss compares logits with the label of the next token, as far as its function shows."""
    try:
        return shift_of(model.loss_function) is True
    except Exception:  # it is a loss of other things
        return False


def _returns_router_logits(model: Any) -> bool:
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False))


def with_positions(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments with positions that start over in each document, by which transformers knows packed samples."""
    documents = options.get(DOCUMENTS)
    others = {name: value for name, value in options.items() if name != DOCUMENTS}
    if documents is None:
        return others
    return {**others, "position_ids": positions_in_documents(documents), "use_cache": False}  # a cache has no documents
