"""What is derived of models of transformers that declare little."""

from __future__ import annotations

import pytest
import torch

from shoal import Split
from shoal.train.build_model import describe
from tests.cover import wide
from tests.rejects import rejects

pytest.importorskip("transformers")
import transformers

from tests import huggingface


def test_a_transposed_layer_is_cut_along_the_other_dim() -> None:
    described = describe(huggingface.build("gpt2"))
    layers = {"attn.c_attn": 1, "attn.c_proj": 0, "mlp.c_fc": 1, "mlp.c_proj": 0}
    assert described.cuts == {f"transformer.h.*.{name}.weight": dim for name, dim in layers.items()}
    assert described.token_blocks == described.blocks  # its last code reshapes by all tokens


def test_an_attention_that_passes_a_bias_of_all_heads_on_stays_whole() -> None:
    """Without it, the next block would compute another bias, and no error."""
    described = describe(huggingface.build("t5"))
    assert described.split_of("encoder.block.0.layer.0.SelfAttention") is Split.ALL_TOKENS
    assert described.cuts == {}


def test_sinks_are_cut_and_low_rank_layers_stay_whole() -> None:
    assert describe(huggingface.build("gpt-oss")).cuts == {"model.layers.*.self_attn.sinks": 0}
    deepseek = describe(huggingface.build("deepseek-v3"))
    attention = "model.layers.0.self_attn"
    assert deepseek.split_of(f"{attention}.kv_a_proj_with_mqa") is Split.LATENT
    assert deepseek.split_of(f"{attention}.kv_b_proj") is Split.COLUMN


@pytest.mark.wide
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers, in DeBERTa
def test_parameters_that_are_read_without_a_call_have_no_place_in_a_pipeline() -> None:
    own = {"max_position_embeddings": 16, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    config = transformers.DebertaV2Config(**huggingface.SMALL | own)
    described = describe(transformers.DebertaV2ForMaskedLM(config))
    assert described.blocks == ("deberta.encoder.layer.0", "deberta.encoder.layer.1")
    assert "rel_embeddings without calling it" in described.why_not["pp"]


def test_a_wrong_dim_in_a_description_is_rejected() -> None:
    from shoal import Description
    from shoal.parallel.split_layers import _check_cut
    from shoal.parallel.tensor import TensorParallel

    tensor = TensorParallel()
    tensor.cuts["h.weight"] = 1
    with rejects("M140", "h.weight", "dim 1", 'cuts={"h.weight": 1}'):
        _check_cut(torch.nn.Linear(2, 2), "h", Description(splits={"h": Split.COLUMN}), tensor)


def test_a_model_that_cannot_be_run_without_memory_has_blocks() -> None:
    """DBRX reads weights of a module without calling it, inside a block. Without blocks, zero=3 would not gather
    them."""
    described = describe(huggingface.build("dbrx"))
    assert described.blocks == ("transformer.blocks.0", "transformer.blocks.1")
    assert "cannot be run without memory" in described.why_not["pp"]
    assert Split.VOCABULARY not in described.splits.values()


def test_blocks_that_share_parameters_are_none() -> None:
    described = describe(huggingface.build("zamba2"))
    assert described.blocks == ()
    assert "share parameters" in described.why_not["pp"]
    assert not any("shared_transformer" in name for name, how in described.splits.items() if how is Split.COLUMN)
    assert "share parameters" in described.why_not["cp"]


def test_a_bias_of_all_logits_beside_the_head_keeps_it_whole() -> None:
    """A rank would add all numbers to a part of the logits."""
    assert Split.VOCABULARY not in describe(huggingface.build("esm")).splits.values()
    assert Split.VOCABULARY in describe(huggingface.build("bert")).splits.values()


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("falcon alibi", "transformer.h.*.mlp.dense_h_to_4h"),  # adds to an output of the trial in place
        ("mpt", "transformer.blocks.*.ffn.up_proj"),  # its mask is no number in float32
        ("granitemoe", "model.layers.*.self_attn.q_proj"),  # its blocks are given a cache
        wide(
            "roberta-prelayernorm", "roberta_prelayernorm.encoder.layer.*.intermediate.dense"
        ),  # no list of what it names
    ],
)
def test_layers_that_a_trial_finds(kind: str, columns: str) -> None:
    assert describe(huggingface.build(kind)).splits[columns] is Split.COLUMN


def test_elements_of_a_list_are_called_and_not_the_list() -> None:
    described = describe(huggingface.build("gemma3n"))
    assert "model.altup_projections.0" in described.before_blocks
    assert "model.altup_unembed_projections.0" in described.after_blocks
    assert "pp" not in described.why_not


def test_why_layers_stay_whole_is_a_property_of_the_model() -> None:
    why = describe(huggingface.build("mamba2")).why_not["tp"]
    assert "mixes all features on the way from backbone.layers.*.mixer.in_proj to mixer.out_proj" in why


@pytest.mark.parametrize("kind", ["apertus", wide("ernie4.5-moe"), wide("afmoe")])
def test_parameters_outside_of_linear_layers_may_compute_each_token(kind: str) -> None:
    """A trial shows it: an activation with numbers of its own, and biases of routers."""
    assert "cp" not in describe(huggingface.build(kind)).why_not


def test_states_of_a_forward_before_are_copied() -> None:
    """RecurrentGemma keeps its last state, with a history that cannot be copied."""
    model = huggingface.build("recurrent-gemma")
    model(**huggingface.batch("recurrent-gemma"))
    assert describe(model).blocks


def test_a_model_that_scales_by_masked_tokens_cannot_divide_them() -> None:
    assert "masked tokens" in describe(huggingface.build("esm")).why_not["cp"]
