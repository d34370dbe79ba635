"""Checkpoints of DeepSpeed become checkpoints of shoal: every element of every tensor, and no pickle runs."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.checkpoint.formats.import_ import ImportSettings, import_checkpoint, read
from shoal.checkpoint.full_tensor import FullTensors
from shoal.checkpoint.storage.locate import find
from shoal.errors import ShoalError
from tests.rejects import rejects

SHAPES: list[dict[str, tuple[int, ...]]] = [{"a.weight": (5, 7), "b.weight": (3, 5)}, {"a.bias": (5,), "b.bias": (3,)}]
RANKS = 3


def whole() -> dict[str, dict[str, Tensor]]:
    """Kind → name → tensor."""
    generator = torch.Generator().manual_seed(0)
    sizes = {name: size for group in SHAPES for name, size in group.items()}
    return {
        kind: {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
        for kind in ("fp32", "exp_avg", "exp_avg_sq")
    }


def model_file(rank: int = 0, **more: Any) -> dict[str, Any]:
    module = {name: one.bfloat16() for name, one in whole()["fp32"].items()}
    tied = {"tied.weight": module["a.weight"]}
    return {
        "module": OrderedDict(**module, **tied, **{"norm.running_mean": torch.arange(3.0)}),
        "buffer_names": ["norm.running_mean"],
        "param_shapes": [OrderedDict((n, torch.Size(s)) for n, s in group.items()) for group in SHAPES],
        "shared_params": {"tied.weight": "a.weight"},
        "global_steps": 7,
        **more,
    }


def stage_2(folder: Path) -> None:
    """A group end to end, cut into equal parts of a size that is a multiple of two."""
    folder.mkdir(parents=True)
    torch.save(model_file(), folder / "mp_rank_00_model_states.pt")
    vectors: dict[str, list[list[Tensor]]] = {}
    for kind, tensors in whole().items():
        vectors[kind] = []
        for group in SHAPES:
            flat = torch.cat([tensors[name].flatten() for name in group])
            each = 2 * math.ceil(flat.numel() / RANKS / 2)
            padded = torch.cat([flat, torch.full((each * RANKS - flat.numel(),), 99.0)])
            parts = list(padded.split(each))
            if kind == "fp32":  # of which DeepSpeed leaves the padding out
                parts = list(flat.split(each))
            vectors[kind].append([*parts, *[torch.empty(0)] * (RANKS - len(parts))])
    for rank in range(RANKS):
        state = {
            number: {
                "step": torch.tensor(7.0),
                **{kind: vectors[kind][number][rank] for kind in ("exp_avg", "exp_avg_sq")},
            }
            for number in range(len(SHAPES))
        }
        partition = [vectors["fp32"][number][rank] for number in range(len(SHAPES))]
        saved = {
            "base_optimizer_state": {"state": state, "param_groups": [{"lr": 1e-3}] * 2},
            "single_partition_of_fp32_groups": partition,
            "partition_count": [RANKS, RANKS],
            "zero_stage": 2,
        }
        torch.save({"optimizer_state_dict": saved}, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def stage_3(folder: Path) -> None:
    """Each parameter cut into equal parts, padded."""
    folder.mkdir(parents=True)

    def part(tensor: Tensor, rank: int) -> Tensor:
        each = -(-tensor.numel() // RANKS)
        flat = torch.cat([tensor.flatten(), torch.full((each * RANKS - tensor.numel(),), 99.0)])
        return flat[rank * each : (rank + 1) * each]

    frozen = torch.arange(4.0).view(2, 2)
    for rank in range(RANKS):
        flats = {
            kind: [torch.cat([part(tensors[name], rank) for name in group]) for group in SHAPES]
            for kind, tensors in whole().items()
        }
        state = {
            number: {"step": 7, **{kind: flats[kind][number] for kind in ("exp_avg", "exp_avg_sq")}}
            for number in range(len(SHAPES))
        }
        saved = {"optimizer_state_dict": {"state": state}, "fp32_flat_groups": flats["fp32"], "partition_count": RANKS}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": saved}, folder / f"{name}_optim_states.pt")
        more = {
            "frozen_param_shapes": {"c.weight": torch.Size((2, 2))},
            "frozen_param_fragments": {"c.weight": part(frozen, rank)},
        }
        content = model_file(rank, **more)
        content["module"] = OrderedDict({"norm.running_mean": torch.arange(3.0)})
        torch.save(content, folder / f"{name}_model_states.pt")


def universal(folder: Path) -> None:
    for kind, tensors in whole().items():
        for name, tensor in tensors.items():
            (folder / "zero" / name).mkdir(parents=True, exist_ok=True)
            torch.save({"param": tensor.flatten()}, folder / "zero" / name / f"{kind}.pt")
            torch.save(torch.tensor(7.0), folder / "zero" / name / "step.pt")
    (folder / "zero" / "tied.weight").mkdir()
    torch.save({"param": torch.zeros(35)}, folder / "zero" / "tied.weight" / "fp32.pt")
    torch.save(model_file(), folder / "mp_rank_00_model_states.pt")


@pytest.mark.parametrize("form", [stage_2, stage_3, universal])
def test_every_element_arrives(tmp_path: Path, form: Any) -> None:
    form(tmp_path / "theirs" / "global_step7")
    (tmp_path / "theirs" / "latest").write_text("global_step7")
    found = read(tmp_path / "theirs", ImportSettings(step=7))
    assert found.format == "deepspeed"
    import_checkpoint(found, tmp_path / "ours", ImportSettings(step=7), lambda size: None)
    step = find(tmp_path / "ours")
    expected = {("model" if kind == "fp32" else f"optimizer/{kind}"): tensors for kind, tensors in whole().items()}
    with FullTensors(step) as full:
        names = step.manifest.tensors
        tensors = {name: torch.cat([box.read() for box in full.tensor(name).boxes]) for name in names}
    for kind, named in expected.items():
        for name, tensor in named.items():
            assert torch.equal(tensors[f"{kind}/{name}"], tensor), name
    assert torch.equal(tensors["model/norm.running_mean"], torch.arange(3.0))
    assert "model/tied.weight" not in tensors
    assert ("model/c.weight" in tensors) == (form is stage_3)
    assert step.manifest.state["scalars"]["a.weight"]["step"] == 7.0


def test_the_step_is_that_of_the_files_unless_it_is_given(tmp_path: Path) -> None:
    stage_2(tmp_path / "theirs")
    for how, step in ((ImportSettings(), 7), (ImportSettings(step=2), 2)):
        import_checkpoint(read(tmp_path / "theirs", how), tmp_path / f"ours{step}", how, lambda size: None)
        assert find(tmp_path / f"ours{step}").manifest.step == step
    torch.save(model_file(global_steps="7"), tmp_path / "theirs" / "mp_rank_00_model_states.pt")
    assert read(tmp_path / "theirs", ImportSettings()).num_steps == 0


def test_what_is_left_out_is_named(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    state = {0: {"step": torch.tensor(7.0), "exp_avg": torch.ones(5, 7), "exp_avg_sq": torch.ones(5, 7)}}
    more = {
        **{"param_shapes": None, "shared_params": None, "ds_version": "0.19.8", "ds_config": {}},
        **{"optimizer": {"state": state, "param_groups": [{"params": [0]}]}, "lr_scheduler": {"last": 3}},
        **{"epoch": 5, "a\nb": 1},  # of the client
    }
    torch.save(model_file(**more), tmp_path / "theirs" / "mp_rank_00_model_states.pt")
    found = read(tmp_path / "theirs", ImportSettings())
    assert found.left_out[0].startswith("optimizer (of ZeRO 0")
    assert found.left_out[1:] == ("lr_scheduler", "epoch", "'a\\nb'")
    assert (found.states, found.num_steps) == ({}, 7)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/shoal-was-run-by-a-pickle",)


@pytest.mark.parametrize("place", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
def test_a_hostile_pickle_does_not_run(tmp_path: Path, place: str) -> None:
    stage_2(tmp_path / "theirs")
    torch.save({"module": {}, "client": Hostile()}, tmp_path / "theirs" / place)
    with rejects("E021", place, "was not run"):
        read(tmp_path / "theirs", ImportSettings())
    assert not Path("/tmp/shoal-was-run-by-a-pickle").exists()


def test_no_bytes_are_taken_for_a_checkpoint(tmp_path: Path) -> None:
    stage_2(tmp_path / "theirs")
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")
    with rejects("E021", "was not run"):
        read(tmp_path / "theirs", ImportSettings())


def test_files_that_are_missing_or_too_many(tmp_path: Path) -> None:
    stage_2(tmp_path / "one")
    (tmp_path / "one" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with rejects("E022", "not of rank 1"):
        read(tmp_path / "one", ImportSettings())
    stage_2(tmp_path / "two")
    (tmp_path / "two" / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    with rejects("E022", "over 3 ranks", "files of 2"):
        read(tmp_path / "two", ImportSettings())
    stage_2(tmp_path / "three")
    torch.save({}, tmp_path / "three" / "mp_rank_01_model_states.pt")
    with rejects("E024", "mp_rank_01", "ds_to_universal"):
        read(tmp_path / "three", ImportSettings())
    (tmp_path / "four").mkdir()
    with rejects("E020", "save_checkpoint"):
        read(tmp_path / "four", ImportSettings(format="deepspeed"))


def test_partitions_that_are_too_short(tmp_path: Path) -> None:
    stage_2(tmp_path / "theirs")
    content = model_file()
    content["param_shapes"][0]["a.weight"] = torch.Size((500, 700))
    torch.save(content, tmp_path / "theirs" / "mp_rank_00_model_states.pt")
    with pytest.raises(ShoalError, match="E023"):
        read(tmp_path / "theirs", ImportSettings())
