"""What is derived of models of transformers that declare little."""

from __future__ import annotations

import pytest
import torch

from shoal import Split
from shoal.train.build_model import describe
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
