"""Members of DeepSpeed's engine: what scripts use is there, and the rest says what is in its place."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal.deepspeed as deepspeed
from shoal.config.deepspeed.translate import translate
from shoal.deepspeed import members
from shoal.deepspeed.engine import Engine
from tests.rejects import rejects

CONFIG: dict[str, Any] = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    "bf16": {"enabled": True},
    "steps_per_print": 7,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 2)
        self.body.requires_grad_(False)
        self.config = {"hidden": 3}
        self.factor = 2.0
        self.timers = 3  # DeepSpeed's engine has this name, too, and means its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


def made(**changes: Any) -> Engine:
    torch.manual_seed(0)
    return deepspeed.initialize(model=Net(), config={**CONFIG, **changes})[0]


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = made()
    yield one
    one.destroy()


def microbatch(engine: Engine) -> None:
    engine.backward(engine(torch.ones(4, 3)).float().square().mean())
    engine.step()


def test_a_step_between_two_updates_was_not_applied(engine: Engine) -> None:
    applied = []
    for _ in range(4):
        microbatch(engine)
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, True]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 4, 16)


def test_another_batch_size(engine: Engine, tmp_path: Path) -> None:
    microbatch(engine)
    with rejects("E015", "inside of a step"):
        engine.set_train_batch_size(4)
    microbatch(engine)
    engine.set_train_batch_size(12)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (12, 3)
    for number in range(3):
        assert engine.is_gradient_accumulation_boundary() == (number == 2)
        microbatch(engine)
    assert (engine.global_steps, engine.global_samples) == (2, 8 + 12)
    engine.save_checkpoint(tmp_path)
    engine.set_train_micro_batch_size(2)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (6, 3)
    with rejects("E006", "5 is no multiple", "set_train_batch_size(4)"):
        engine.set_train_batch_size(5)
    with rejects("E006", "at least 1"):
        engine.set_train_micro_batch_size(0)
    engine.load_checkpoint(tmp_path)
    assert engine.global_samples == 20


def test_gradients_of_a_step_are_not_dropped(engine: Engine) -> None:
    engine.zero_grad()
    loss = engine(torch.ones(4, 3)).float().square().mean()
    engine.zero_grad()  # before the backward, as scripts of torch do: there is no gradient yet
    engine.backward(loss)
    engine.step()
    with rejects("E015", "zero_grad() inside of a step"):
        engine.zero_grad()
    assert engine.optimizer is not None
    with rejects("E015", "zero_grad() inside of a step"):
        engine.optimizer.zero_grad()
    microbatch(engine)
    engine.optimizer.zero_grad()


def test_where_a_step_ends(engine: Engine) -> None:
    with engine.no_sync():
        with rejects("E015", "inside of no_sync"), engine.no_sync():
            pass
        loss = engine(torch.ones(4, 3)).float().mean()
        engine.backward(loss)
        with rejects("E015", "step() inside of no_sync"):
            engine.step()
        loss = engine(torch.ones(4, 3)).float().mean()
    engine.set_gradient_accumulation_boundary(True)
    with rejects("E015", "differ in whether it ends the step"):
        engine.backward(loss)


def test_a_step_without_a_synchronised_backward(engine: Engine) -> None:
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(engine(torch.ones(4, 3)).float().mean())
    engine.set_gradient_accumulation_boundary(True)
    with rejects("E015", "the last backward of the step"):
        engine.step()


def test_fewer_microbatches_than_the_config_says() -> None:
    """The losses are divided by the number of the config, as in DeepSpeed."""
    weights = []
    for boundary, factor in ((True, 1.0), (None, 0.5)):
        changes = {} if boundary else {"train_batch_size": 4}
        engine = made(**changes, optimizer={"type": "SGD", "params": {"lr": 0.1}}, scheduler=None, gradient_clipping=0)
        engine.set_gradient_accumulation_boundary(boundary)
        engine.backward(engine(torch.ones(4, 3)).float().square().mean() * factor)
        engine.step()
        assert engine.global_steps == 1
        weights.append(engine.module.head.weight.detach().clone())
        engine.destroy()
    torch.testing.assert_close(*weights)


def test_numbers_of_the_config(engine: Engine) -> None:
    assert engine.config["train_batch_size"] == 8  # as in DeepSpeed, and not the model's
    assert (engine.optimizer_name(), engine.optimizer_params()) == ("AdamW", {"lr": 0.1})
    assert (engine.scheduler_name(), engine.scheduler_params()) == ("WarmupLR", {"warmup_num_steps": 4})
    assert (engine.steps_per_print(), engine.wall_clock_breakdown()) == (7, False)
    assert engine.get_mom() == [(0.9, 0.999)]
    assert (engine.loss_scale(), engine.dynamic_loss_scale()) == (0.0, False)
    assert not engine.zero_optimization_partition_gradients()
    ranks = (engine.mp_world_size, engine.mpu, engine.get_data_parallel_rank(), engine.get_model_parallel_rank())
    assert ranks == (1, None, 0, 0)
    assert engine.factor == 2.0  # of the model


def test_frozen_parameters_of_what_is_saved(engine: Engine, tmp_path: Path) -> None:
    microbatch(engine), microbatch(engine)
    with pytest.warns(UserWarning, match="saves the frozen parameters, too"):
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with warnings.catch_warnings(action="error"):  # said once
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    names = {"head.weight", "head.bias"}
    assert set(engine.module_state_dict(exclude_frozen_parameters=True)) == names
    engine.save_16bit_model(tmp_path, exclude_frozen_parameters=True)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert {name: one.dtype for name, one in saved.items()} == dict.fromkeys(names, torch.bfloat16)
    whole = engine._zero3_consolidated_16bit_state_dict()
    assert whole is not None
    assert set(whole) == names | {"body.weight", "body.bias"}


def test_the_loader_is_there_again() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    engine, _, loader, _ = deepspeed.initialize(model=Net(), config=CONFIG, training_data=data)
    assert engine.training_dataloader is loader
    [first, second] = engine.deepspeed_io(data, route="eval")
    assert torch.cat([first[0], second[0]]).tolist() == list(range(8))
    with rejects("E018", "deepspeed_io has no workers=3"):
        engine.deepspeed_io(data, workers=3)
    engine.destroy()


@pytest.mark.parametrize("name", [*members.OF_ENGINE, *members.OF_PIPELINES, "zero_reduce_scatter", "nonsense"])
def test_a_member_that_is_not_here_names_what_is(name: str, engine: Engine) -> None:
    assert not hasattr(engine, name)
    with rejects("E018", f"engine has no {name!r}") as caught:
        getattr(engine, name)
    assert caught.value.problems[0].fix


def test_the_nearest_name(engine: Engine) -> None:
    with rejects("E018", "no 'global_step'", "engine.global_steps"):
        engine.global_step  # noqa: B018
    with rejects("E018", "zero_hpz_partition_size", 'engine.config["zero_optimization"]'):
        engine.zero_hpz_partition_size()
    with rejects("E018", "no 'initialise'", "shoal.deepspeed.initialize"):
        deepspeed.initialise  # noqa: B018


def test_arguments_of_other_versions(engine: Engine) -> None:
    engine.backward(engine(torch.ones(4, 3)).float().mean(), allreduce_gradients=True, release_loss=False)
    engine.step()
    with rejects("E018", "allreduce_gradients=False"):
        engine.backward(engine(torch.ones(4, 3)).float().mean(), allreduce_gradients=False)
    with rejects("E018", "retain_graf=True", "engine.backward(..., retain_graph=...)"):
        engine.backward(engine(torch.ones(4, 3)).float().mean(), retain_graf=True)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's compiler
def test_the_config_says_what_is_compiled(engine: Engine) -> None:
    with rejects("E018", "engine.compile()", '"deepcompile": true'):
        engine.compile()
    compiled = made(compile={"deepcompile": True})
    compiled.compile(backend="inductor", schedule=None)
    assert compiled.run.policies.compute.compile is True
    compiled.destroy()


def test_keys_without_effect_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    zero = {"stage": 1, "reduce_bucket_size": 123, "compute_grad_norm": True}
    for _ in range(2):
        made(zero_optimization=zero).destroy()
    said = capsys.readouterr().err
    assert said.count("zero_optimization.reduce_bucket_size 123: no effect here") == 1
    assert "optimizer.params.lr" not in said  # it has one


class Divides(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 0.0


@pytest.mark.parametrize("checks", [None, True, False])
def test_a_step_that_is_not_finite(checks: bool | None) -> None:
    """bf16.check_grad_overflow: DeepSpeed drops the update unless it is false, and then it trains on with NaN."""
    bf16 = {"enabled": True} | ({} if checks is None else {"check_grad_overflow": checks})
    words = {**CONFIG, "bf16": bf16, "train_batch_size": 4}
    engine, *_ = deepspeed.initialize(model=Divides(), config=words)
    engine.backward(engine(torch.ones(4, 3)).float().mean())
    if checks is False:
        with rejects("T032", "not finite on rank 0"):
            engine.step()
    else:
        engine.step()
        assert (engine.skipped_steps, engine.was_step_applied()) == (1, False)
    engine.run.world.close()


def test_a_schedule_that_begins_later() -> None:
    params = {"warmup_num_steps": 4, "warmup_max_lr": 1.0, "warmup_type": "linear", "last_batch_iteration": 1}
    engine = made(scheduler={"type": "WarmupLR", "params": params}, train_batch_size=4)
    microbatch(engine)
    assert engine.get_lr() == [pytest.approx(0.5)]  # of iteration 2 of 4
    engine.destroy()
    found = translate({**CONFIG, "scheduler": {"type": "WarmupLR", "params": params}}, target="train", num_ranks=1)
    assert any("last_batch_iteration 1 has no counterpart" in problem.what for problem in found.problems)


def test_a_number_of_steps_that_no_run_makes() -> None:
    """Accelerate writes infinity for a config that prints nothing."""
    engine = made(steps_per_print=float("inf"))
    engine.destroy()
    found = translate({**CONFIG, "steps_per_print": float("inf")}, target="train", num_ranks=1)
    assert found.settings["run.log_every"] == 2**31
