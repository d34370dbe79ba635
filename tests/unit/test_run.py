"""`Run` in a world of one, against a loop in plain torch: the loss law, accumulation, clipping, fp16, NaN, misuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.errors import RunFailed, ShoalError
from shoal.models import llama
from shoal.numerics.gradients import LossScale
from shoal.numerics.init import initialise
from shoal.train.run import Run
from tests.rejects import rejects


@pytest.fixture
def make_run() -> Iterator[Any]:
    runs: list[Run] = []

    def make(*arguments: Any, **options: Any) -> Run:
        runs.append(Run(*arguments, device="cpu", **options))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()


def ragged_batch(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Labels of which some do not count, unevenly over the microbatches; the first two samples have none at all."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 3, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 5, (size, 3), generator=generator)
    labels[torch.rand(size, 3, generator=generator) < 0.4] = -100
    labels[:2] = -100
    return inputs, labels


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], clip: float) -> float:
    """What one process without microbatches does."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.item()


def assert_same_weights(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-13) -> None:
    for (name, mine), (other, reference) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("plan", ["fp64", "fp64 mb=8", "fp64 mb=4", "fp64 mb=3", "fp64 mb=1"])
def test_microbatches_change_nothing_even_when_ragged(make_run: Any, plan: str) -> None:
    ours, theirs = network(), network()
    run = make_run(plan, clip=0.1)
    run.prepare(ours, torch.optim.AdamW(ours.parameters(), lr=0.05))
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.05)
    for seed in range(5):
        loss = run.step(ragged_batch(seed))
        assert float(loss) == pytest.approx(plain_step(theirs, reference, ragged_batch(seed), 0.1), rel=1e-13)
    assert_same_weights(ours, theirs)


def test_a_loop_of_ones_own_computes_the_same(make_run: Any) -> None:
    ours, theirs = network(), network()
    run = make_run("fp64 mb=4", clip=0.1)
    run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for seed in range(3):
        for inputs, labels in run.microbatches(ragged_batch(seed)):
            run.backward(F.cross_entropy(run.model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100))
        loss = run.update().loss
        assert float(loss) == pytest.approx(plain_step(theirs, reference, ragged_batch(seed), 0.1), rel=1e-13)
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("plan", ["fp64 mb=2", "fp64 mb=1"])
def test_a_microbatch_in_which_nothing_counts_counts_for_nothing(make_run: Any, plan: str) -> None:
    """Its mean is 0 / 0. The first two samples of a ragged batch have no label that counts."""
    ours, theirs = network(), network()

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    run = make_run(plan, clip=0.1, loss=mean)
    run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    expected = plain_step(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), ragged_batch(0), 0.1)
    assert float(run.step(ragged_batch(0))) == pytest.approx(expected, rel=1e-13)
    assert_same_weights(ours, theirs)


def test_a_loss_of_ones_own_is_a_mean_over_samples(make_run: Any) -> None:
    ours, theirs = network(), network()
    run = make_run("fp64 mb=3", loss=lambda model, batch: model(batch["x"]).square().mean())
    run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    data = torch.randn(8, 6, dtype=torch.float64)
    loss = run.step({"x": data})
    expected = theirs(data).square().mean()
    expected.backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=0)
    assert_same_weights(ours, theirs)


def test_prepare_returns_what_it_got_in_that_order(make_run: Any) -> None:
    run = make_run()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 6), torch.zeros(4, dtype=torch.long)), batch_size=2)
    again, prepared, dealt = run.prepare(optimizer, model, loader)
    assert again is optimizer
    assert prepared is model is run.model is run.module
    assert len(dealt) == 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("plan", ["fsdp", "zero=2", "dp_shard=1 zero=1"])
def test_sharding_with_nobody_costs_nothing(make_run: Any, plan: str) -> None:
    """FSDP2 on a world of one gathers and scatters all the same: it is not there at all."""
    model = make_run(plan).prepare(network())
    assert not any(isinstance(module, FSDPModule) for module in model.modules())


def test_batches_of_a_loader_train(make_run: Any) -> None:
    run = make_run("fp32 mb=2")
    torch.manual_seed(1)
    inputs = torch.randn(32, 6)
    data = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), batch_size=8, shuffle=True)
    model = network()
    model, _, loader = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05), data)
    losses = [float(run.step(batch)) for _ in range(10) for batch in run.batches(loader)]
    assert len(losses) == 40
    assert losses[-1] < 0.2 < losses[0]


def test_fp16_overflow_drops_the_step_and_halves_the_scale(make_run: Any) -> None:
    run = make_run("fp16", loss_scale=2.0**30, loss_scale_window=3)
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [parameter.clone() for parameter in model.parameters()]
    batch = ragged_batch(0)[0].float(), ragged_batch(0)[1]
    run.step(batch)
    assert run.report is not None
    assert run.report.was_skipped
    assert not run.report.note
    assert run.loss_scale.scale == 2.0**29
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new)
    while run.report.was_skipped:
        run.step(batch)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_loss_scale_changes_nothing_but_the_scale(make_run: Any) -> None:
    """A scale is a power of two, so float32 arithmetic with and without it gives the same bits."""
    models = []
    for scale in (1.0, 2.0**10):
        run = make_run("fp32", clip=0.05)
        run.updates.loss_scale = LossScale(scale)
        model = network()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.step((ragged_batch(0)[0].float(), ragged_batch(0)[1]))
        models.append(model)
    assert_same_weights(*models, tolerance=0)


def poisoned() -> tuple[Tensor, Tensor]:
    inputs, labels = ragged_batch(0)
    labels[5] = 1
    inputs[5] = torch.nan
    return inputs, labels


def test_nan_stops_the_run_and_names_the_place(make_run: Any) -> None:
    run = make_run("fp64 mb=2")
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with rejects("T032", "step 1", "rank 0", "microbatch 2", kind=RunFailed):
        run.step(poisoned())
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_nan_can_be_skipped(make_run: Any) -> None:
    run = make_run("fp64 mb=2", on_nan="skip")
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.step(poisoned())
    assert run.report is not None
    assert run.report.was_skipped
    assert "microbatch 2" in run.report.note
    run.step(ragged_batch(1))
    assert not run.report.was_skipped
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_nan_can_be_ignored(make_run: Any) -> None:
    run = make_run("fp64", on_nan="ignore")
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run.step(poisoned())
    assert any(parameter.isnan().any() for parameter in model.parameters())


# ---- judged on the device: what a GPU does, here on a CPU, whose fused optimizers can do it too ----------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_update_judged_on_the_device_is_the_same(make_run: Any, kind: Any, clip: float | None) -> None:
    models = []
    for defers_nan_check in (False, True):
        run = make_run("fp64 mb=2", clip=clip)
        run.updates.defers_nan_check = defers_nan_check
        model = network()
        run.prepare(model, kind(model.parameters(), lr=0.1, fused=True))
        for step in range(3):
            run.step(ragged_batch(step))
        run.check_last_step()
        models.append(model)
    assert_same_weights(*models, tolerance=1e-14)


def test_a_first_step_that_is_dropped_leaves_no_state_unfilled(make_run: Any) -> None:
    """torch's fused SGD makes its momentum of whatever is in memory, and would fill it in the step that is dropped."""
    run = make_run("fp32 mb=2", on_nan="skip")
    run.updates.defers_nan_check = True
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    run.prepare(model, optimizer)
    run.step(tuple(x.float() if x.is_floating_point() else x for x in poisoned()))
    assert not optimizer.state
    run.step((ragged_batch(1)[0].float(), ragged_batch(1)[1]))
    assert all(state["momentum_buffer"].isfinite().all() for state in optimizer.state.values())


def test_late_nan_stops_the_run_at_the_next_step_and_leaves_the_weights(make_run: Any) -> None:
    run = make_run("fp64 mb=2")
    run.updates.defers_nan_check = run.updates.has_updated = True
    model = network()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    before = [parameter.clone() for parameter in model.parameters()]
    run.step(poisoned())
    with rejects("T032", "step 1", "rank 0", "microbatch 2", kind=RunFailed):
        run.step(ragged_batch(1))
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_late_nan_in_the_last_step_stops_the_run_when_it_is_checked(make_run: Any) -> None:
    run = make_run("fp64 mb=2")
    run.updates.defers_nan_check = run.updates.has_updated = True
    model = network()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    run.step(poisoned())
    with rejects("T032", "step 1", kind=RunFailed):
        run.check_last_step()
    run.check_last_step()  # once is enough


def test_late_nan_can_be_skipped_as_if_the_step_had_not_been(make_run: Any) -> None:
    models = []
    for batches in ([poisoned(), ragged_batch(1)], [ragged_batch(1)]):
        run = make_run("fp64 mb=2", on_nan="skip", clip=0.05)
        run.updates.defers_nan_check = run.updates.has_updated = True
        model = network()
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
        reports = []
        for batch in batches:
            run.step(batch)
            reports.append(run.report)
        run.check_last_step()
        models.append(model)
        assert [report.was_skipped for report in reports] == [True, False][-len(batches) :]
        assert [bool(report.note) for report in reports] == [True, False][-len(batches) :]
    assert_same_weights(*models, tolerance=0)


def test_late_nan_can_be_ignored(make_run: Any) -> None:
    run = make_run("fp64", on_nan="ignore")
    run.updates.defers_nan_check = run.updates.has_updated = True
    model = network()
    run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True))
    run.step(poisoned())
    run.check_last_step()
    assert any(parameter.isnan().any() for parameter in model.parameters())


class Overflowing(torch.autograd.Function):
    """A finite loss with a gradient that is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * torch.inf


def test_a_gradient_that_is_not_finite_is_named(make_run: Any) -> None:
    run = make_run("fp64", loss=lambda model, batch: Overflowing.apply(model(batch["x"])).square().mean())
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with rejects("T032", "gradient of 0.weight", kind=RunFailed):
        run.step({"x": torch.ones(2, 6, dtype=torch.float64)})


def test_evaluation_is_the_mean_over_everything_and_changes_nothing(make_run: Any) -> None:
    run = make_run("fp64")
    model = nn.Sequential(nn.Dropout(0.9), *network())
    run.prepare(model)
    batches = [ragged_batch(seed) for seed in range(3)]
    inputs, labels = torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])
    expected = F.cross_entropy(network()(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100)
    assert run.evaluate(batches) == pytest.approx(expected.item(), rel=1e-13)
    assert model.training


@pytest.mark.parametrize("told_after", range(5))
def test_an_evaluation_is_left_when_somebody_says_so_before_one_of_its_batches(make_run: Any, told_after: int) -> None:
    run = make_run("fp64")
    model = network()
    run.prepare(model)
    answers = iter([False] * told_after + [True])
    batches = [ragged_batch(seed) for seed in range(3)]
    found = run.evaluate(batches, stop=lambda: next(answers))
    assert found == (None if told_after < 3 else run.evaluate(batches))
    assert model.training


def test_randomness_belongs_to_the_step_not_to_the_past(make_run: Any) -> None:
    def losses(skipped: int) -> list[float]:
        run = make_run("fp64", seed=3)
        model = nn.Sequential(nn.Dropout(0.5), *network())
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        torch.rand(skipped)
        return [float(run.step(ragged_batch(0))) for _ in range(3)]

    first = losses(0)
    assert first == losses(17)
    assert len(set(first)) == 3  # each step draws its own


@pytest.mark.parametrize(
    ("misuse", "code"),
    [
        (lambda run: run.step(ragged_batch(0)), "T030"),
        (lambda run: run.prepare(42), "T029"),
        (lambda run: run.prepare(network(), network()), "T002"),
        (lambda run: [run.prepare(torch.optim.SGD(network().parameters())) for _ in range(2)], "T002"),
        (
            lambda run: run.prepare(network(), torch.optim.SGD(network().parameters(), lr=0.1)),
            "T027",
        ),
        (
            lambda run: run.prepare(torch.compile(llama.build(num_layers=1), backend="eager")),
            "M059",
        ),
        (lambda run: run.prepare(nn.ParameterList([nn.Parameter(torch.ones(2, device="meta"))])), "M051"),
        (lambda run: (run.prepare(network()), run.step((torch.ones(2, 6), torch.ones(2)))), "T021"),
        (lambda run: (run.prepare(network()), run.update()), "T011"),
        (lambda run: (run.prepare(network()), run.step({"x": torch.ones(2, 6)})), "T025"),
        (
            lambda run: (run.prepare(network()), run.step((torch.ones(2, 6).double(), torch.full((2,), -100)))),
            "T013",
        ),
    ],
)
def test_misuse_gets_the_error_of_its_rule(make_run: Any, misuse: Any, code: str) -> None:
    with rejects(code):
        misuse(make_run("fp64"))


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("attention", "flushed", "'auto', 'fa4', 'cudnn', 'flash', 'efficient' or 'math'"),
        ("attention", None, "'auto', 'fa4', 'cudnn'"),
        ("algorithm", "rng", "'ring'"),
        ("bucket_mb", -1, "25"),
        ("bucket_mb", "big", "bucket_mb=25"),
        ("warmup_steps", -1, "warmup_steps=0"),
        ("outer", 0.7, "shoal.OuterOptimizer("),
        ("fused_loss", "plain", "None, True or False"),
        ("recompute_swiglu", "false", "True or False"),
        ("fp8", "row", "'tensorwise' or 'rowwise'"),
        ("fp8_head", "grad", "'gradients' or 'none'"),
        ("fp8_min_features", 0, "512"),
        ("fp8_min_features", "16", "512"),
        ("fp8_min_features", True, "512"),
        ("compile", "inducto", "'inductor'"),
        ("compile", "max-autotune", "compile=True"),
        ("compile", {"mode": "max-autotune"}, "compile=True"),
        ("param_dtype", "bf15", "'fp32' or 'bf16'"),
        ("loss", "fused", "fused_loss=True"),
        ("on_nan", "Stop", "'stop', 'skip' or 'ignore'"),
        ("on_nan", None, "'stop', 'skip' or 'ignore'"),
        ("clip", -1.0, "clip=1.0"),
        ("clip", 0, "clip=None"),
        ("clip", float("nan"), "clip=1.0"),
        ("clip", "1", "clip=1.0"),
        ("loss_scale", 0.0, "65536.0"),
        ("loss_scale_window", 0, "2000"),
    ],
)
def test_a_misspelt_option_is_named_with_what_it_may_be(make_run: Any, name: str, value: Any, fix: str) -> None:
    with pytest.raises(ShoalError) as caught:
        make_run("bf16", **{name: value})
    assert repr(value) in str(caught.value)
    assert fix in str(caught.value)


def test_backends_that_are_for_debugging_are_taken_and_not_advised(make_run: Any) -> None:
    make_run("fp32", compile="aot_eager")
    with pytest.raises(ShoalError) as caught:
        make_run("fp32", compile="inducto")
    assert "eager" not in str(caught.value)
    assert "TESTING" not in str(caught.value)


def test_a_loss_of_ones_own_is_not_fused(make_run: Any) -> None:
    with rejects("T039"):
        make_run("fp32", fused_loss=True, loss=lambda model, batch: model(batch).sum())


def test_a_model_that_nobody_has_drawn_is_drawn_from_the_seed(make_run: Any) -> None:
    shape = {"hidden": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "ffn": 32, "vocabulary": 8}
    bare, drawn, partly = (llama.build(**shape, max_sequence=8) for _ in range(3))
    with torch.device("meta"):
        empty = llama.build(**shape, max_sequence=8)
    initialise(drawn, 3)
    with torch.no_grad():
        partly.lm_head.weight.fill_(0.5)
    for model in (bare, empty, partly):
        make_run("fp32", seed=3).prepare(model)
    for name, expected in drawn.named_parameters():
        assert torch.equal(bare.get_parameter(name), expected)
        assert torch.equal(empty.get_parameter(name), expected)
        assert torch.equal(partly.get_parameter(name), expected) == (name != "lm_head.weight")
    assert bool((partly.lm_head.weight == 0.5).all())


def test_floating_inputs_take_the_dtype_of_the_weights(make_run: Any) -> None:
    run = make_run("fp64")
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = run.step((ragged_batch(0)[0].float(), ragged_batch(0)[1]))
    assert loss.dtype == torch.float64


def test_a_loop_of_ones_own_computes_in_the_precision_of_the_plan(make_run: Any) -> None:
    run = make_run("bf16")
    model = nn.Sequential(nn.Linear(6, 5), nn.Identity())
    seen = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    prepared = run.prepare(model)
    assert prepared(torch.ones(2, 6)).dtype == torch.float32
    assert seen == [torch.bfloat16]


def test_backward_twice_without_update_is_refused(make_run: Any) -> None:
    """The habit of other systems, whose accumulation is a counter; here the next batch would be scaled wrongly."""
    run = make_run("fp64")
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = run.batches([ragged_batch(0), ragged_batch(1)])
    inputs, labels = next(batches)
    run.backward(F.cross_entropy(run.model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100))
    with rejects("T007"):
        next(batches)


def test_a_batch_that_was_taken_apart_is_still_the_same_step(make_run: Any) -> None:
    ours, theirs = network(), network()
    run = make_run("fp64 mb=3", clip=0.1)
    run.prepare(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    expected = plain_step(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), ragged_batch(0), 0.1)
    for inputs, labels in run.batches([ragged_batch(0)]):
        assert float(run.step((inputs, labels))) == pytest.approx(expected, rel=1e-13)
    assert_same_weights(ours, theirs)


def test_parameters_without_an_optimizer_do_not_pile_up(make_run: Any) -> None:
    run = make_run("fp64")
    model = network()
    run.prepare(model, torch.optim.SGD(model[2].parameters(), lr=0.0))
    norms = []
    for _ in range(3):
        run.step(ragged_batch(0))
        assert run.report is not None
        norms.append(float(run.report.grad_norm))
    assert norms[0] == norms[1] == norms[2]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_nan_under_fp16_is_no_overflow(make_run: Any) -> None:
    run = make_run("fp16 mb=2")
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with rejects("T032", "rank 0", "microbatch 2", kind=RunFailed):
        run.step(poisoned())
    assert run.loss_scale.scale == 65536.0


def test_evaluation_leaves_frozen_parts_frozen(make_run: Any) -> None:
    run = make_run("fp64")
    model = nn.Sequential(nn.BatchNorm1d(3), *network())
    model[0].eval()
    run.prepare(model)
    run.evaluate([ragged_batch(0)])
    assert [module.training for module in model] == [False, True, True, True]


class Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


class WithOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, inputs: Tensor) -> Output:
        return Output(self.network(inputs))


def test_logits_may_be_an_attribute(make_run: Any) -> None:
    run = make_run("fp64")
    model = WithOutput()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert torch.isfinite(run.step(ragged_batch(0)))


@pytest.mark.parametrize("loss", [F.mse_loss, nn.CrossEntropyLoss()])
def test_a_criterion_is_no_loss_of_a_model_and_a_batch(loss: Any) -> None:
    with rejects("T018", match=r"called as loss\(model, batch\)"):
        Run(loss=loss, device="cpu")


def test_what_is_between_replicas_changes_nothing_where_there_is_one(make_run: Any) -> None:
    run = make_run("compress=powersgd:4 sync=diloco:50")
    run.prepare(nn.Linear(2, 2))
    assert run.composed.reducer is None
    assert run.composed.local_sgd is None


def test_a_step_in_which_nothing_that_is_trained_has_a_gradient_has_a_norm_of_the_kind_of_the_others() -> None:
    """It was a float32 zero of the CPU's, which on a GPU could not be told together with the loss."""
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "idle": nn.Linear(3, 1)})
    with Run(
        "fp64", device="cpu", loss=lambda model, x: model["used"](x).square().mean(), find_unused_parameters=True
    ) as run:
        run.prepare(model, torch.optim.SGD(model["idle"].parameters(), lr=0.1))
        run.step(torch.ones(2, 3))
        assert run.report is not None
        assert (run.report.grad_norm.dtype, float(run.report.grad_norm)) == (torch.float64, 0.0)


WRONG_LOSSES = {
    "a vector": (lambda model, batch: model(batch[0]).square(), r"not a tensor of torch.float32 and shape \(2, 3\)"),
    "nothing": (lambda model, batch: None, "not None"),
    "a float": (lambda model, batch: model(batch[0]).mean().item(), "not a float"),
}


@pytest.mark.parametrize(("loss", "said"), WRONG_LOSSES.values(), ids=WRONG_LOSSES)
def test_a_loss_that_is_not_one_number_is_told(loss: Any, said: str) -> None:
    with Run("fp32", device="cpu", loss=loss) as run:
        run.prepare(model := nn.Linear(4, 3), torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("T012", match=f"a loss is a tensor of one number.*{said}"):
            run.step((torch.ones(2, 4), torch.zeros(2, dtype=torch.long)))


def test_labels_of_another_shape_are_told_and_any_whole_numbers_are_taken() -> None:
    with Run("fp32", device="cpu") as run:
        run.prepare(model := nn.Linear(4, 3), torch.optim.SGD(model.parameters(), lr=0.0))
        with rejects("T020", "(2, 3)", "(2, 1, 2)"):
            run.step((torch.ones(2, 4), torch.zeros(2, 1, 2, dtype=torch.long)))
        one_hot = torch.eye(3, dtype=torch.long)[:2]
        with rejects("T020", "labels.argmax(-1)"):
            run.step((torch.ones(2, 4), one_hot))
        run.step((torch.ones(2, 4), one_hot.argmax(-1)))  # as the fix says
    with Run("fp32", device="cpu") as run:
        run.prepare(model := nn.Conv1d(4, 3, 1), torch.optim.SGD(model.parameters(), lr=0.0))
        with rejects("T020", "logits.movedim(1, -1)"):
            run.step((torch.ones(2, 4, 5), torch.zeros(2, 5, dtype=torch.long)))
    losses = []
    model = nn.Linear(4, 3)
    for kind in (torch.int64, torch.int32, torch.uint8):
        with Run("fp32", device="cpu") as run:
            run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
            losses.append(float(run.step((torch.ones(2, 4), torch.ones(2, dtype=kind)))))
    assert losses == losses[:1] * 3


def test_a_batch_without_samples_is_told() -> None:
    with Run("fp32", device="cpu") as run:
        run.prepare(model := nn.Linear(4, 3), torch.optim.SGD(model.parameters(), lr=0.1))
        with rejects("T008"):
            run.step((torch.ones(0, 4), torch.ones(0, dtype=torch.long)))


def test_a_step_that_the_script_makes_itself_is_rejected() -> None:
    """Between `run.batches` and `run.update()`, a step would not be weighed, clipped or counted."""
    model = nn.Linear(3, 2)
    samples = [(torch.randn(3), 0) for _ in range(6)]
    with Run("fp64", device="cpu") as run:
        loader = torch.utils.data.DataLoader(samples, batch_size=2)
        model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
        before = model.weight.detach().clone()
        for inputs, labels in run.batches(loader):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            with rejects("T040"):
                optimizer.step()
            break
        assert torch.equal(model.weight, before)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_profile_of_too_few_steps_says_how_many_they_were(make_run: Any, num_steps: int) -> None:
    run = make_run("fp64")
    model = network()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with rejects("T081", f"at least 2 steps, got {num_steps}"), shoal.profile(run):
        for _ in range(num_steps):
            run.step((torch.ones(2, 6, dtype=torch.float64), torch.tensor([0, 1])))
