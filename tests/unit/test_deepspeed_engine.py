"""The engine of `shoal.deepspeed` on one rank: its arguments, its order of calls, and what it writes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal.deepspeed as deepspeed
from shoal.deepspeed.engine import Engine
from tests.rejects import rejects

CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "bf16": {"enabled": True},
}


@pytest.fixture
def engine() -> Iterator[Engine]:
    made, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=CONFIG)
    yield made
    made.destroy()


def test_it_writes_and_reads_its_own_files(engine: Engine, tmp_path: Path) -> None:
    assert engine.load_checkpoint.__doc__
    with pytest.warns(UserWarning, match="latest"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    engine.backward(engine(torch.randn(4, 3)).square().mean())
    engine.step()
    assert (engine.global_steps, engine.global_samples, engine.train_batch_size()) == (1, 4, 4)
    engine.save_checkpoint(tmp_path, tag="one", client_state={"seen": 4})
    weight = engine.module.weight.detach().clone()
    with torch.no_grad():
        engine.module.weight.zero_()
    path, state = engine.load_checkpoint(tmp_path)
    assert (path, state) == (str(tmp_path / "one"), {"seen": 4})
    assert torch.equal(engine.module.weight, weight)
    engine.save_16bit_model(tmp_path / "out")
    saved = torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(saved["weight"], weight.bfloat16())
    assert engine.in_features == 3  # of the model


def test_arguments_of_a_load_have_the_order_of_deepspeed(engine: Engine, tmp_path: Path) -> None:
    engine.backward(engine(torch.randn(4, 3)).square().mean())
    engine.step()
    engine.save_checkpoint(tmp_path, "one", {"seen": 4})
    assert engine.load_checkpoint(tmp_path, "one", True, True, True) == (str(tmp_path / "one"), {"seen": 4})
    assert engine.load_checkpoint(tmp_path, "one", True, True, True, True) == (str(tmp_path / "one"), {})  # weights
    with rejects("E016", "load_module_strict=False"):
        engine.load_checkpoint(tmp_path, "one", False)


def test_a_resumed_run_may_accumulate_otherwise(tmp_path: Path) -> None:
    sizes = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}
    for number, config in ((1, CONFIG), (3, {**CONFIG, **sizes})):
        engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=config)
        if number == 3:
            engine.load_checkpoint(tmp_path)
            assert (engine.global_steps, engine.micro_steps) == (2, 6)
        for _ in range(2 * number):
            engine.backward(engine(torch.randn(4, 3)).square().mean())
            engine.step()
        engine.save_checkpoint(tmp_path)
        engine.destroy()
    assert (engine.global_steps, engine.micro_steps) == (4, 12)


def test_wrong_calls(engine: Engine, tmp_path: Path) -> None:
    with rejects("E015", "without a backward"):
        engine.step()
    loss = engine(torch.randn(4, 3)).mean()
    with rejects("E015", "one number"):
        engine.backward(torch.ones(2))
    with rejects("E015", "retain_graph"):
        engine.backward(loss, retain_graph=True)
    engine.backward(loss)
    with rejects("E015", "twice"):
        engine.backward(loss)
    engine.step()
    with rejects("E016", "../x"):
        engine.save_checkpoint(tmp_path, tag="../x")
    with rejects("E016", "load_optimizer_states"):
        engine.load_checkpoint(tmp_path, tag="one", load_optimizer_states=False)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "mp_rank_00_model_states.pt").touch()
    with rejects("E016", "saved by DeepSpeed", "shoal checkpoint import"):
        engine.load_checkpoint(tmp_path, tag="theirs")


def test_wrong_arguments() -> None:
    with rejects("E013", "needs a model", match="needs a config, got None(.|\n)*no argument mpu"):
        deepspeed.initialize(mpu=object())
    with rejects("E014", "optimizer.params.lr"):
        deepspeed.initialize(
            model=nn.Linear(1, 1), config={**CONFIG, "optimizer": {"type": "Adam", "params": {"lr": "auto"}}}
        )
    with rejects("E007", "train_batch_size"):
        deepspeed.initialize(model=nn.Linear(1, 1), config={"optimizer": CONFIG["optimizer"]})
    with rejects("E013", "schedule needs an optimizer"):
        scheduler = {"type": "WarmupLR", "params": {}}
        deepspeed.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 4, "scheduler": scheduler})
    assert not torch.distributed.is_initialized()  # nothing was started


def test_a_place_that_the_launcher_has_not_given_is_rejected() -> None:
    """Each process would train alone."""
    with rejects("E013", "given rank 1 of 2, and this process is rank 0 of 1"):
        deepspeed.init_distributed("gloo", init_method="tcp://127.0.0.1:29500", rank=1, world_size=2)
    with rejects("E013", "init_method='tcp://127.0.0.1:29500'"):
        deepspeed.init_distributed(init_method="tcp://127.0.0.1:29500")
    with rejects("E013", "timedelta, got 1800"):
        deepspeed.init_distributed(timeout=1800)  # type: ignore[arg-type]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("minutes", "seconds"), [("", 600.0), ("45", 2700.0), ("long", 600.0)])
def test_how_long_a_collective_may_wait(minutes: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_TIMEOUT", minutes)
    for timeout in (None, timedelta(hours=2)):
        deepspeed.init_distributed(timeout=timeout, rank=0, world_size=1)
        engine, *_ = deepspeed.initialize(model=nn.Linear(3, 2), config=CONFIG)
        assert engine.run.world.timeout == (7200.0 if timeout else seconds)
        engine.destroy()


def test_parts_of_deepspeed_that_are_not_here_name_what_is() -> None:
    with rejects("E018", "no 'zero'", "engine.run.weights"):
        deepspeed.zero.Init  # noqa: B018
    with rejects("E018", "no 'tuner'"):
        deepspeed.tuner  # noqa: B018
    assert not hasattr(deepspeed, "comm")


def test_arguments_of_a_script() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)  # as scripts for launchers do
    parser = deepspeed.add_config_arguments(parser)
    read = parser.parse_args(["--deepspeed", "--deepspeed_config", "a.json", "--local_rank", "2"])
    assert (read.deepspeed, read.deepspeed_config, read.local_rank) == (True, "a.json", 2)


def test_schedules_begin_with_two_steps_at_the_lowest_rate() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = deepspeed.WarmupDecayLR(optimizer, 8, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    rates = [schedule.get_last_lr()[0]]
    for _ in range(9):
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0]
    other = deepspeed.WarmupDecayLR(optimizer, 8, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear")
    other.load_state_dict(schedule.state_dict())
    assert other.get_lr() == [0.0]


def test_each_group_may_have_its_rates() -> None:
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    groups = [{"params": list(first.parameters())}, {"params": list(second.parameters())}]
    config = {"type": "WarmupLR", "params": {"warmup_max_lr": [1.0, 0.5], "warmup_num_steps": 4}}
    words = {**CONFIG, "scheduler": {**config, "params": {**config["params"], "warmup_type": "linear"}}}  # type: ignore
    engine, _, _, schedule = deepspeed.initialize(
        model=nn.Sequential(first, second), model_parameters=groups, config=words
    )
    for _ in range(3):
        schedule.step()
    assert schedule.get_last_lr() == [0.5, 0.25]
    engine.destroy()
    with rejects("E010", "warmup_max_lr has 3 rates, and the optimizer 1 groups"):
        deepspeed.WarmupLR(torch.optim.SGD(first.parameters(), lr=1.0), warmup_max_lr=[1.0, 2.0, 3.0])


def test_a_highest_rate_of_zero_is_zero() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    schedule = deepspeed.WarmupLR(optimizer, warmup_max_lr=0.0, warmup_num_steps=2)
    assert schedule.highest == [0.0]
    for _ in range(4):
        schedule.step()
    assert schedule.get_last_lr() == [0.0]
