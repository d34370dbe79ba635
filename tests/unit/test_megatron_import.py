"""Checkpoints of Megatron-LM become those of a llama: every element of every tensor, whatever cut them, and no pickle
runs. `make test-peers` reads folders that Megatron Core has written."""

from __future__ import annotations

import argparse
import enum
import fractions
import itertools
import json
import os
import pickle
import signal
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.formats import dcp
from shoal.checkpoint.formats.import_ import ImportSettings, detect, import_checkpoint, read
from shoal.checkpoint.formats.lazy_tensor import Box, LazyTensor, full
from shoal.checkpoint.storage.locate import find
from shoal.cli import main
from shoal.models.llama import build
from tests.rejects import rejects

# Two groups of three query heads; 70 words, padded to 72.
LAYERS, D, HEADS, GROUPS, H, F, V, PADDED = 3, 16, 6, 2, 4, 10, 70, 72
ARGS: dict[str, Any] = {
    "num_layers": LAYERS, "hidden_size": D, "num_attention_heads": HEADS, "group_query_attention": True,
    "num_query_groups": GROUPS, "kv_channels": H, "ffn_hidden_size": F, "swiglu": True, "add_bias_linear": False,
    "normalization": "RMSNorm", "norm_epsilon": 1e-6, "position_embedding_type": "rope", "rotary_base": 5000,
    "max_position_embeddings": 64, "untie_embeddings_and_output_weights": True, "padded_vocab_size": PADDED,
    "window_size": None, "exit_signal": signal.SIGTERM, "params_dtype": torch.bfloat16, "save": Path("elsewhere"),
}  # fmt: skip
PREFIXES = {
    "weight": "",
    "param": "optimizer.state.param.",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
}


def llama(seed: int) -> dict[str, Tensor]:
    """Random values for every parameter of the llama that the arguments describe."""
    config = {"hidden": D, "num_layers": LAYERS, "num_heads": HEADS, "num_kv_heads": GROUPS, "head_dim": H, "ffn": F}
    names = build(vocabulary=PADDED, **config).state_dict()
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in names.items()}


def megatron(of: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same values as Megatron Core has them, head by head; layers one after the other."""
    layers: dict[str, list[Tensor]] = {}
    for i in range(LAYERS):
        own = {name.removeprefix(f"model.layers.{i}."): one for name, one in of.items() if f"layers.{i}." in name}
        q, k, v = (own[f"self_attn.{name}_proj.weight"].split(H) for name in "qkv")
        each = HEADS // GROUPS
        rows = [part for g in range(GROUPS) for part in (*q[g * each : (g + 1) * each], k[g], v[g])]
        for name, value in {
            "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
            "self_attention.linear_qkv.weight": torch.cat(rows),
            "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
            "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
            "mlp.linear_fc1.weight": torch.cat([own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]),
            "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
        }.items():
            layers.setdefault(f"decoder.layers.{name}", []).append(value)
    return {
        "embedding.word_embeddings.weight": of["model.embed_tokens.weight"],
        **{name: torch.stack(values) for name, values in layers.items()},
        "decoder.final_layernorm.weight": of["model.norm.weight"],
        "output_layer.weight": of["lm_head.weight"],
    }


def in_pieces(tensor: Tensor) -> LazyTensor:
    """A piece of each layer, matrices also cut in two by rows, as tensor parallelism cuts them."""
    shape = tuple(tensor.shape)
    dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype]
    if len(shape) == 1:
        return LazyTensor(dtype, shape, (Box((0,), shape, tensor.clone),))  # a writer frees what it has written
    is_layers = shape[0] == LAYERS
    matrix = (shape[-2] // 2, shape[-1]) if len(shape) == 2 + is_layers else shape[1:]
    step = (1, *matrix) if is_layers else matrix
    boxes = []
    for begin in itertools.product(*(range(0, size, each) for size, each in zip(shape, step, strict=True))):
        where = tuple(slice(at, at + each) for at, each in zip(begin, step, strict=True))
        boxes.append(Box(begin, step, tensor[where].clone))
    return LazyTensor(dtype, shape, tuple(boxes))


@pytest.fixture
def enums() -> Iterator[Any]:
    """An enum of Megatron, as long as a file is written."""
    names = ["megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.enums"]
    modules = {name: types.ModuleType(name) for name in names}
    kind = enum.Enum("AttnBackend", {"flash": 1, "auto": 5}, module=names[-1])
    modules[names[-1]].AttnBackend = kind  # type: ignore[attr-defined]
    sys.modules.update(modules)
    yield kind
    for name in names:
        del sys.modules[name]


def save(folder: Path, kinds: dict[str, dict[str, Tensor]], *, changed: Any = None, **more: Any) -> Path:
    """Write `iter_0000007` of a folder, and what else is there."""
    step = folder / "iter_0000007"
    step.mkdir(parents=True)
    tensors = {PREFIXES[kind] + name: one for kind, values in kinds.items() for name, one in megatron(values).items()}
    tensors = {name: one.bfloat16() if not name.startswith("optimizer") else one for name, one in tensors.items()}
    tensors |= changed or {}
    dcp.write(step, {name: in_pieces(one) for name, one in tensors.items()}, lambda size: None)
    optimizer = {"optimizer": {"param_groups": [{"step": 7, "lr": 1e-3}]}}
    common = {
        "iteration": 7,
        "args": argparse.Namespace(**ARGS),
        "optimizer": optimizer,
        "opt_param_scheduler": {"a": 1},
    }
    torch.save({**common, **more}, step / "common.pt")
    (step / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return step


def args_with(**more: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**ARGS, **more})


def test_every_element_arrives_where_it_belongs(tmp_path: Path, enums: Any) -> None:
    kinds = {kind: llama(seed) for seed, kind in enumerate(PREFIXES)}
    save(tmp_path, kinds, args=args_with(attention_backend=enums.auto))
    found = read(tmp_path, ImportSettings())  # the iteration that is said to be the newest
    assert (found.format, found.num_steps) == ("megatron", 7)
    assert found.model.keys() == kinds["param"].keys()
    for name, values in kinds["param"].items():  # in float32, not the rounded ones
        assert torch.equal(full(found.model[name]), values), name
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(full(found.states[kind, name]), kinds[kind][name]), (kind, name)
        assert full(found.states["step", name]) == 7
    assert found.left_out == ("opt_param_scheduler",)
    assert found.section == {
        "name": "llama", "vocabulary": PADDED, "hidden": D, "num_layers": LAYERS, "num_heads": HEADS,
        "num_kv_heads": GROUPS, "head_dim": H, "ffn": F, "max_sequence": 64, "rope_theta": 5000.0, "norm_eps": 1e-6,
        "tied": False, "init_std": 0.02,
    }  # fmt: skip
    build(**{key: value for key, value in found.section.items() if key != "name"})


def test_weights_of_16_bits_without_masters(tmp_path: Path) -> None:
    step = save(tmp_path, {"weight": llama(0)})
    found = read(step, ImportSettings())  # an iteration
    for name, values in llama(0).items():
        assert torch.equal(full(found.model[name]), values.bfloat16()), name
    assert not found.states


def test_the_padding_of_the_vocabulary_can_be_left_out(tmp_path: Path) -> None:
    save(tmp_path, {"weight": llama(0), "exp_avg": llama(1)})
    found = read(tmp_path, ImportSettings(vocabulary=V))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(full(found.model[name]), llama(0)[name][:V].bfloat16())
        assert torch.equal(full(found.states["exp_avg", name]), llama(1)[name][:V])
    assert found.section is not None
    assert found.section["vocabulary"] == V
    with rejects("E066", PADDED, PADDED + 1):
        read(tmp_path, ImportSettings(vocabulary=PADDED + 1))
    with rejects("C042", "dcp"):
        read(tmp_path / "iter_0000007", ImportSettings(vocabulary=V, format="dcp"))
    with rejects("C042", "model."):
        read(tmp_path, ImportSettings(prefix="model."))


def test_layers_that_lie_one_by_one(tmp_path: Path) -> None:
    """Some versions do not stack them, and norms are modules where Transformer Engine is not used."""
    values = megatron(llama(0))
    own = {"self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight"}
    own["mlp.linear_fc1.layer_norm_weight"] = "pre_mlp_layernorm.weight"
    flat = {}
    for name, value in values.items():
        rest = name.removeprefix("decoder.layers.")
        flat |= {name: value} if rest == name else {
            f"decoder.layers.{i}.{own.get(rest, rest)}": value[i] for i in range(LAYERS)
        }  # fmt: skip
    step = save(tmp_path, {}, changed=flat)
    found = read(step, ImportSettings())
    for name, one in llama(0).items():
        assert torch.equal(full(found.model[name]), one), name


def test_a_tied_head_has_one_name(tmp_path: Path) -> None:
    values = megatron(llama(0))
    del values["output_layer.weight"]
    save(tmp_path, {}, changed=values, args=args_with(untie_embeddings_and_output_weights=False))
    found = read(tmp_path, ImportSettings())
    assert "lm_head.weight" not in found.model
    assert found.section is not None
    assert found.section["tied"] is True


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "theirs", {"weight": llama(0), "exp_avg": llama(1), "exp_avg_sq": llama(2)})
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["step"], found["skipped"]) == ("megatron", 7, ["opt_param_scheduler"])
    manifest = find(tmp_path / "ours").manifest
    assert manifest.state["model"] == found["model"]
    assert manifest.state["scalars"]["model.norm.weight"] == {"step": 7.0}


# ---- what is rejected -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"), ("swiglu", False), ("position_embedding_type", "learned_absolute"),
        ("add_bias_linear", True), ("qk_layernorm", True), ("num_experts", 8), ("rotary_percent", 0.5),
        ("use_rope_scaling", True), ("window_size", (128, 0)), ("rotary_interleaved", True),
        ("apply_layernorm_1p", True), ("softmax_type", "off-by-one"),
    ],
)  # fmt: skip
def test_a_model_that_is_no_llama(tmp_path: Path, name: str, value: Any) -> None:
    save(tmp_path, {"weight": llama(0)}, args=args_with(**{name: value}))
    with rejects("C045", name, value if not isinstance(value, tuple) else "tuple"):
        read(tmp_path, ImportSettings())


def test_a_weight_that_a_llama_has_not(tmp_path: Path) -> None:
    save(tmp_path, {"weight": llama(0)}, changed={"decoder.layers.self_attention.linear_qkv.bias": torch.ones(3, 40)})
    with rejects("C045", "linear_qkv.bias"):
        read(tmp_path, ImportSettings())
    assert read(tmp_path / "iter_0000007", ImportSettings(format="dcp")).format == "dcp"  # as the fix says


@pytest.mark.parametrize(
    "args", [{"num_layers": LAYERS + 1}, {"ffn_hidden_size": F + 1}, {"hidden_size": "many"}, {"num_layers": 2**40}]
)
def test_arguments_that_the_tensors_do_not_have(tmp_path: Path, args: dict[str, Any]) -> None:
    save(tmp_path, {"weight": llama(0)}, args=args_with(**args))
    with rejects("E066"):
        read(tmp_path, ImportSettings())


def test_states_without_names_stay_behind(tmp_path: Path) -> None:
    name = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.bfloat16).bucket_idx_0.exp_avg"
    save(tmp_path, {"weight": llama(0)}, changed={name: torch.ones(64)})
    found = read(tmp_path, ImportSettings())
    assert not found.states
    assert found.left_out == (name, "opt_param_scheduler")


@pytest.mark.parametrize("text", ["", "seven", "../../etc", "1" * 50])
def test_the_name_of_the_newest_iteration(tmp_path: Path, text: str) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with rejects("E064", "latest_checkpointed_iteration.txt"):
        read(tmp_path, ImportSettings())


def test_another_format_of_megatron(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "iter_0000007" / "mp_rank_00").mkdir(parents=True)
    assert detect(tmp_path) == "megatron"
    with rejects("E064", "common.pt", "torch_dist"):
        read(tmp_path, ImportSettings())
    (tmp_path / "iter_0000007" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with rejects("E064", "zarr"):
        read(tmp_path, ImportSettings())


class Hostile:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("place", ["args", "optimizer", "other"])
def test_arguments_that_run_a_command_run_nothing(tmp_path: Path, place: str) -> None:
    evil = Hostile(f"touch {tmp_path / 'ran'}")
    step = save(tmp_path, {"weight": llama(0)}, **{place: args_with(save=evil) if place == "args" else evil})
    with rejects("E065", "posix.system"):
        read(tmp_path, ImportSettings())
    assert not (tmp_path / "ran").exists()
    torch.load(step / "common.pt", weights_only=False)  # as Megatron-LM does it
    assert (tmp_path / "ran").exists()


def test_a_name_that_is_neither_plain_nor_of_megatron(tmp_path: Path) -> None:
    save(tmp_path, {"weight": llama(0)}, args=args_with(ratio=fractions.Fraction(1, 2)))
    with rejects("E065", "fractions.Fraction"):
        read(tmp_path, ImportSettings())


def test_metadata_and_pieces_that_run_a_command_run_nothing(tmp_path: Path) -> None:
    step = save(tmp_path, {"weight": llama(0)})
    path = step / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = Hostile(f"touch {tmp_path / 'ran'}")
    sound = path.read_bytes()
    path.write_bytes(pickle.dumps(metadata))
    with rejects("C036", "posix.system"):
        read(tmp_path, ImportSettings())
    path.write_bytes(sound)
    for piece in step.glob("*.distcp"):
        piece.write_bytes(pickle.dumps(Hostile(f"touch {tmp_path / 'ran'}")).ljust(piece.stat().st_size, b"\0"))
    how = ImportSettings()
    with rejects("C035"):
        import_checkpoint(read(tmp_path, how), tmp_path / "ours", how, lambda size: None)
    assert not (tmp_path / "ran").exists()


def test_names_of_megatron_are_not_looked_up(tmp_path: Path, enums: Any) -> None:
    """Not even if they can be imported: a name becomes a record."""
    called: list[Any] = []
    module = sys.modules["megatron.core"]
    run = _named(called, module)
    module.run = run  # type: ignore[attr-defined]

    class Calls:
        def __reduce__(self) -> tuple[Any, ...]:
            return run, ("ran",)

    save(tmp_path, {"weight": llama(0)}, args=args_with(spec=Calls()))
    assert read(tmp_path, ImportSettings()).num_steps == 7
    assert not called
    torch.load(tmp_path / "iter_0000007" / "common.pt", weights_only=False)
    assert called == ["ran"]


def _named(called: list[Any], module: types.ModuleType) -> Any:
    """A function that pickle finds in a module."""

    def run(value: Any) -> None:
        called.append(value)

    run.__module__, run.__qualname__ = module.__name__, "run"
    return run


def test_bytes_that_are_no_file_of_torch(tmp_path: Path) -> None:
    step = save(tmp_path, {"weight": llama(0)})
    for data in (b"", b"PK\3\4", (step / "common.pt").read_bytes()[:300]):
        (step / "common.pt").write_bytes(data)
        with rejects("E065"):
            read(tmp_path, ImportSettings())
    torch.save({"iteration": 7}, step / "common.pt")
    with rejects("E066", "common.pt"):
        read(tmp_path, ImportSettings())
