"""A folder for DeepSpeed: what its own reader looks for, and what ours reads again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.deepspeed as deepspeed
from shoal.checkpoint.formats.deepspeed.write import write_universal
from shoal.checkpoint.formats.export import ExportSettings, export
from shoal.checkpoint.formats.import_ import ImportSettings, read
from shoal.checkpoint.formats.lazy_tensor import full, in_memory
from shoal.checkpoint.storage.filesystem import Filesystem
from shoal.checkpoint.storage.locate import find
from shoal.cli import main
from tests.rejects import rejects

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(1, 1)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.register_buffer("count", torch.tensor(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.second(self.first(x))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor], float]:
    """A step of three updates, its tensors, and the learning rate of the fourth."""
    torch.manual_seed(0)
    engine, optimizer, *_ = deepspeed.initialize(model=Net(), config=CONFIG)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 3)).square().mean())
        engine.step()
    engine.save_checkpoint(tmp_path / "run", tag="step")
    model = engine.module
    there = {f"{name}/fp32": p.detach().clone() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state[parameter].items():
            there[f"{name}/{kind}"] = value.detach().clone()
    engine.destroy()
    return tmp_path / "run" / "step", there, float(engine.get_lr()[0])


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_all_tensors_of_a_step_are_in_a_universal_checkpoint(
    saved: tuple[Path, dict[str, Tensor], float], tmp_path: Path
) -> None:
    step, there, rate = saved
    settings = ExportSettings(format="deepspeed", optimizer=True)
    export(find(step), tmp_path / "ds", settings, lambda size: None)
    inner = tmp_path / "ds" / "global_step3"
    assert {(tmp_path / "ds" / name).read_text() for name in ("latest", "latest_universal")} == {"global_step3"}
    for name, tensor in there.items():
        found = load(inner / "zero" / f"{name}.pt")
        torch.testing.assert_close(found if name.endswith("step") else found["param"], tensor, rtol=0, atol=0)
    for kind in ("exp_avg", "exp_avg_sq"):  # of a parameter that has had no gradient
        assert torch.equal(load(inner / "zero" / "unused.weight" / f"{kind}.pt")["param"], torch.zeros(1, 1))
    assert float(load(inner / "zero" / "unused.weight" / "step.pt")) == 3.0
    common = load(inner / "zero" / "optimizer_state.pt")
    assert {group["lr"] for group in common["param_groups"]} == {rate}
    assert len(common["param_groups"]) > 1000
    assert float(common["optimizer_state_dict"]["state"][0]["step"]) == 3.0
    model = load(inner / "mp_rank_00_model_states.pt")
    assert torch.equal(model["module"]["first.weight"], there["first.weight/fp32"])
    assert (model["global_steps"], model["lr_scheduler"]["last_batch_iteration"]) == (3, 2)
    assert load(inner / "zero_pp_rank_0_mp_rank_00_model_states.pt")["global_steps"] == 3


def test_what_is_written_is_read_again(saved: tuple[Path, dict[str, Tensor], float], tmp_path: Path) -> None:
    step, there, _ = saved
    words = ["checkpoint", "export", str(step), str(tmp_path / "ds"), "--format", "deepspeed", "--optimizer"]
    assert main(words) == 0
    found = read(tmp_path / "ds", ImportSettings())
    assert (found.format, found.num_steps) == ("deepspeed", 3)
    weights = {name.removesuffix("/fp32"): one for name, one in there.items() if name.endswith("/fp32")}
    assert {name: full(one).tolist() for name, one in found.model.items() if name in weights} == {
        name: one.tolist() for name, one in weights.items()
    }
    assert full(found.model["scale"]).tolist() == [2.0, 3.0]
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(full(found.states[kind, "first.weight"]), there[f"first.weight/{kind}"])
    assert float(full(found.states["step", "first.weight"])) == 3.0


def test_weights_alone(saved: tuple[Path, dict[str, Tensor], float], tmp_path: Path) -> None:
    export(find(saved[0]), tmp_path / "ds", ExportSettings(format="deepspeed"), lambda size: None)
    files = {path.name for path in (tmp_path / "ds" / "global_step3" / "zero" / "first.weight").iterdir()}
    assert files == {"fp32.pt"}
    export(find(saved[0]), tmp_path / "ds", ExportSettings(format="deepspeed", overwrite=True), lambda size: None)


@pytest.mark.parametrize("name", ["../../evil", "/tmp/evil", ".."])
def test_nothing_is_written_outside_of_the_folder(name: str, tmp_path: Path) -> None:
    weights = {name: in_memory("F32", torch.zeros(2))}
    with rejects("E025", name):
        write_universal(tmp_path / "ds", weights, {}, (), progress=lambda size: None, disk=Filesystem())
    assert not list(tmp_path.rglob("*.pt"))
