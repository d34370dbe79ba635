"""An optimizer in host memory makes the updates that it would make on the device. The copies of a GPU are in
tests/gpu/test_layouts.py; here the device is the CPU too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.blueprint.plan import Plan
from shoal.numerics.offload.host_copies import HostCopies, num_changes, num_step_hooks
from shoal.numerics.optim.adamw import AdamW
from tests.rejects import rejects

STEPS = 4


class WholeSteps(torch.optim.SGD):
    """Counts its steps, as schedule-free optimizers do: it must not be called once a bucket."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return super().step(closure)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8), nn.Linear(8, 1, bias=False)).double()


def trained(
    make: Callable[[Iterable[Any]], Optimizer], *, bucket: int | None, folder: str | None = None
) -> list[torch.Tensor]:
    """The weights after some steps; `bucket`: bytes of it in host memory, None: not offloaded."""
    net = model()
    optimizer = make(net.parameters())
    copies = HostCopies(optimizer, lambda one: one, bucket=bucket, folder=folder) if bucket is not None else None
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        net.zero_grad(set_to_none=True)
        net(torch.randn(5, 8, dtype=torch.float64, generator=generator)).square().sum().backward()
        if step == 2:  # a parameter without a gradient is not updated
            net[0].bias.grad = None
        (copies or optimizer).step()
    if copies is not None:
        for parameter, host in copies.pairs:
            assert torch.equal(parameter, host)
            assert host.grad is None
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("bucket", [1, 200, 2**20])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: WholeSteps(p, lr=0.05, momentum=0.9),
    ],
)
def test_updates_by_buckets_are_those_of_the_device(make: Callable[[Iterable[Any]], Optimizer], bucket: int) -> None:
    for one, other in zip(trained(make, bucket=bucket), trained(make, bucket=None), strict=True):
        assert torch.equal(one, other)


def test_bf16_weights_and_states_are_updated_by_buckets_as_at_once() -> None:
    def weights(bucket: int | None) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(torch.linspace(0, 1, n).bfloat16()) for n in (300, 40, 2000)]
        optimizer = AdamW(parameters, lr=0.01, state_dtype="bf16")
        copies = HostCopies(optimizer, lambda one: one, bucket=bucket) if bucket else None
        for step in range(STEPS):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, step - 1.5)
            (copies or optimizer).step()
        return [parameter.detach() for parameter in parameters]

    assert all(map(torch.equal, weights(bucket=1), weights(bucket=None)))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
def test_torchs_optimizers_use_their_fused_kernel_on_the_host_unless_the_script_chose(
    kind: Any, tmp_path: Path
) -> None:
    """The default of torch for host memory, a loop over tensors, made a step nine times as long."""
    for chosen, wanted in (({}, True), ({"fused": False}, False), ({"foreach": True}, None)):
        net = model()
        optimizer = kind(net.parameters(), lr=0.05, **chosen)
        with shoal.Run(f"fp64 offload=optimizer:{tmp_path}", device="cpu") as run:
            run.prepare(net, optimizer)
        assert [group["fused"] for group in optimizer.param_groups] == [wanted]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("folder", ["", "states"])
@pytest.mark.parametrize("options", [{}, {"fused": True}])
def test_weights_of_any_layout_are_updated_right(
    kind: Any, folder: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """torch's fused kernels run over memory in order: with a state in another layout, updates went elsewhere."""

    def weights(plan: str, options: dict[str, Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Conv2d(3, 8, 3).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if not options:
            net.other = nn.Parameter(torch.randn(8, 16, dtype=torch.float64)[:, ::2].t())
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(net.parameters(), lr=0.05, **more, **options)
        with shoal.Run(plan, device="cpu", loss=lambda net, x: (net(x) * getattr(net, "other", x).sum()).sum()) as run:
            run.prepare(net, optimizer)
            for step in range(3):
                run.step(torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(step)).double())
            return [parameter.detach().clone() for parameter in run.parameters]

    (tmp_path / "states").mkdir()
    plan = f"fp64 offload=optimizer:{tmp_path / folder}" if folder else "fp64 offload=optimizer"
    for one, other in zip(weights(plan, options), weights("fp64", options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_states_in_files_make_the_same_updates(tmp_path: Path) -> None:
    def make(parameters: Iterable[Any]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05, fused=True)

    found = trained(make, bucket=200, folder=str(tmp_path))
    assert all(map(torch.equal, found, trained(make, bucket=None)))
    assert not list(tmp_path.iterdir()), "the files have no name"


def test_a_rank_without_a_row_of_a_tensor_keeps_states_in_files(tmp_path: Path) -> None:
    """Of a bias with one row, only one rank has a shard."""
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 3)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    copies = HostCopies(optimizer, lambda one: one, folder=str(tmp_path))
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        copies.step()
        assert copies.files is not None
        here = optimizer.param_groups[0]["params"]
        held = [copies.files.holds(optimizer.state[parameter]["exp_avg"]) for parameter in here]
        assert held == [True, False, True]
    assert all((parameter < 1).all() for parameter in parameters)


def test_states_that_are_loaded_go_to_files(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    copies = HostCopies(optimizer, lambda one: one, folder=str(tmp_path))
    assert copies.files is not None
    for _ in range(2):
        net(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
        copies.step()
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        assert len(states) == 10
        assert all(map(copies.files.holds, states))
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
        assert not any(copies.files.holds(state["exp_avg"]) for state in optimizer.state.values())


def test_loaded_states_take_the_place_of_those_before(tmp_path: Path) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    copies = HostCopies(optimizer, lambda one: one, folder=str(tmp_path))
    used = []
    for _ in range(3):
        net(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
        copies.step()
        assert copies.files is not None
        used.append(sum(arena.used for arena in copies.files.arenas))
        optimizer.load_state_dict(deepcopy(optimizer.state_dict()))
    assert used[0] == used[2]


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_the_state_of_steps_before_is_kept(tmp_path: Path, name: str) -> None:
    """Adagrad has a state from the beginning."""
    found = []
    for folder in (None, str(tmp_path)):
        net = model()
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.1)
        copies: HostCopies | None = None
        for step in range(4):
            if step == 2 and folder is not None:
                copies = HostCopies(optimizer, lambda one: one, folder=folder)
            net.zero_grad()
            net(torch.full((1, 8), step + 1.0, dtype=torch.float64)).sum().backward()
            (copies or optimizer).step()
        assert len(optimizer.state_dict()["state"]) == 5
        found.append([parameter.detach() for parameter in net.parameters()])
    assert all(map(torch.equal, *found))


def test_changes_are_counted() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    before = num_changes(parameter.detach())
    with torch.no_grad():
        parameter.mul_(2)
    assert num_changes(parameter.detach()) == before + 1


def test_a_folder_that_cannot_hold_the_states_is_named(tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(model().parameters(), lr=0.1)
    copies = HostCopies(optimizer, lambda one: one, folder=str(tmp_path / "absent"))
    for parameter, _ in copies.pairs:
        parameter.grad = torch.ones_like(parameter)
    with rejects("T092", "absent", "No such file"):
        copies.step()


def test_words_of_a_plan_name_the_folder() -> None:
    plan = Plan.parse("zero=1 offload=optimizer:/mnt/NVMe")
    assert (plan.offloaded, plan.offload_folder) == ("optimizer", "/mnt/NVMe")
    assert Plan.parse(str(plan)) == plan
    for wrong in ("optimizer:", "parameters:/mnt", "optimizer:/a b"):
        with rejects("P006", "offload must be none, optimizer or parameters"):
            Plan(offload=wrong)


def test_an_optimizer_of_the_users_own_steps_once() -> None:
    net = model()
    optimizer = WholeSteps(net.parameters(), lr=0.1)
    copies = HostCopies(optimizer, lambda one: one, bucket=1)
    net(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
    copies.step()
    assert optimizer.calls == 1


def test_a_hook_of_the_script_is_called_once() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    called = []
    optimizer.register_step_pre_hook(lambda *_: None)  # as Run.prepare does
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    assert num_step_hooks(optimizer) == 2
    copies = HostCopies(optimizer, lambda one: one, bucket=1)
    net(torch.ones(1, 8, dtype=torch.float64)).sum().backward()
    copies.step()
    assert called == [1]


def test_the_predicted_time_is_that_of_the_benchmark() -> None:
    """8.03 B parameters on one H200, 2 x 4096 tokens: benchmarks/results/offload_nvidia-h200_2026-11-18.md."""
    words = {"seq_len": 4096, "global_batch": 2, "plan": "mb=2 bf16 offload=optimizer"}
    best = shoal.plan("llama3-8b", cluster="h200:1", **words).best[0].prediction
    assert best.memory.allocated / 2**30 == pytest.approx(66.7, rel=0.01)
    assert best.time.total == pytest.approx(2.85, rel=0.1)
    assert best.time.optimizer == 0


def test_a_run_with_states_in_files_saves_and_resumes_as_any_other(tmp_path: Path) -> None:
    def losses(plan: str, steps: int, *, load: bool = False, save: bool = False) -> list[float]:
        net = model()
        with shoal.Run(plan, device="cpu", loss=lambda net, batch: net(batch).square().mean()) as run:
            run.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05, fused=True))
            if load:
                run.load(tmp_path / "saved")
            batches = [torch.randn(6, 8, generator=torch.Generator().manual_seed(step)).double() for step in range(6)]
            done = 3 if load else 0
            found = [run.step(batch).item() for batch in batches[done : done + steps]]
            if save:
                run.save(tmp_path / "saved")
        return found

    (tmp_path / "states").mkdir()
    in_files = f"fp64 offload=optimizer:{tmp_path / 'states'}"
    expected = losses("fp64", 6)
    assert losses(in_files, 3, save=True) == expected[:3]
    assert losses(in_files, 3, load=True) == expected[3:]
    assert losses("fp64", 3, load=True) == expected[3:]
