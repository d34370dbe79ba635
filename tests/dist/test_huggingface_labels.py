"""Models of transformers keep their convention for labels: the loss and every gradient are those of
`model(**whole_batch).loss`, whatever the ranks and microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal import ShoalError
from shoal.blueprint.plan import Plan
from shoal.comm.world import World
from shoal.models.huggingface.labels import shifts_labels
from shoal.train.build_model import adapt, describe
from shoal.train.checks import rule_under
from shoal.train.loss.objective import LabelRule
from shoal.train.run import Run
from tests.cover import wide
from tests.dist.pool import Pool
from tests.rejects import rejects

transformers = pytest.importorskip("transformers")

VOCABULARY, TOKENS = 41, 7
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2}
CAUSAL = ["gpt2", "llama"]
ZERO = ("key.bias", "k_proj.bias")  # softmax cancels what a bias of keys adds: these gradients are rounding alone


def build(kind: str) -> nn.Module:
    """Tiny, without dropout, in float64."""
    torch.manual_seed(3)
    t = transformers
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if kind == "gpt2":
        config = t.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=16)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = t.GPT2LMHeadModel(config)
    elif kind == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**SMALL, **HEADS, max_position_embeddings=16))
    elif kind == "mixtral":
        model = t.MixtralForCausalLM(t.MixtralConfig(**SMALL, **HEADS, num_key_value_heads=2, num_local_experts=4))
        model.config.output_router_logits = True
    elif kind.startswith("bert"):
        config = t.BertConfig(**SMALL, **HEADS, **no_dropout, max_position_embeddings=16, num_labels=3)
        classes = {"mlm": t.BertForMaskedLM, "tokens": t.BertForTokenClassification}
        classes |= {"sequence": t.BertForSequenceClassification, "qa": t.BertForQuestionAnswering}
        model = classes[kind.partition(" ")[2]](config)
    elif kind == "t5":
        sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
        model = t.T5ForConditionalGeneration(t.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))
    else:  # of the name of a causal language model, and it does not shift
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 32, "dropout": 0.0}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32}
        config = t.BartConfig(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes, **heads)
        model = {"bart": t.BartForConditionalGeneration, "bart decoder": t.BartForCausalLM}[kind](config)
    return model.double()


def batch(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, VOCABULARY, (8, TOKENS), generator=generator)
    labels = ids.clone()
    for row in range(8):  # ragged: of the first two samples few labels count
        labels[row, : 5 - row] = -100
    labels[0] = -100
    padded = torch.ones_like(ids)
    padded[5:, -2:] = 0
    labels[5:, -2:] = -100
    if kind == "bert sequence":
        labels = ids[:, 0] % 3
    elif kind == "bert tokens":
        labels = torch.where(labels == -100, labels, labels % 3)
    return {"input_ids": ids, "attention_mask": padded, "labels": labels}


def expected(kind: str, whole: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain transformers, but for its casts to float32 in norms and before the loss."""
    model = build(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        loss = model(**whole).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def one_step(world: World, kind: str, plan: str, own: bool = False) -> tuple[float, float, float, dict[str, Tensor]]:
    """The loss of an evaluation before it, of the step and of the next one, and the gradients of the second."""
    options: dict[str, Any] = {"loss": lambda model, batch: model(**batch).loss} if own else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", Tensor.double)
        run = Run(f"fp64 {plan}", world=world, **options)
        model = build(kind)
        run.prepare(model)
        run.prepare(torch.optim.SGD(run.parameters, lr=0.0))
        whole = batch(kind)
        share = 8 // run.degree
        mine = {name: value[run.coordinate * share :][:share] for name, value in whole.items()}
        first = run.evaluate([mine])
        loss = run.step(mine).item()
        found: dict[str, Tensor] = {}
        run.on_gradients = lambda: found.update(
            {n: g for n, g in run.composed.full_tensors("gradient") if g is not None}
        )
        run.step(mine)
        assert run.report is not None
        return first, loss, run.report.loss.item(), found


def assert_same(kind: str, results: list[Any]) -> None:
    loss, gradients = expected(kind, batch(kind))
    for first, second, third, found in results:
        assert [first, second, third] == pytest.approx([loss.item()] * 3, rel=1e-12)
        if found:
            for name, gradient in gradients.items():
                is_zero = name.endswith(ZERO)
                assert is_zero == bool(gradient.norm() < 1e-12), name
                apart = float((found[name] - gradient).norm() / (1.0 if is_zero else gradient.norm()))
                assert apart <= 1e-12, f"{name}: {apart:.1e}"
    assert results[0][3]


@pytest.mark.parametrize(
    "kind", [*CAUSAL, wide("bert mlm"), wide("bert tokens"), "bert sequence", "t5", wide("bart"), "bart decoder"]
)
def test_a_models_convention_for_labels_is_kept(pool: Pool, kind: str) -> None:
    assert_same(kind, pool.run(one_step, 1, kind, ""))
    assert_same(kind, pool.run(one_step, 1, kind, "mb=3"))


@pytest.mark.parametrize(
    ("kind", "plan"), [("gpt2", "mb=2"), ("llama", "zero=3 mb=3"), wide("gpt2", "zero=3 mb=3"), wide("llama", "mb=2")]
)
def test_labels_are_counted_after_the_shift_on_every_rank(pool: Pool, kind: str, plan: str) -> None:
    assert_same(kind, pool.run(one_step, 2, kind, plan))


@pytest.mark.parametrize(("size", "plan"), [wide(1, "mb=2"), (2, "mb=3"), wide(2, "zero=2 mb=1")])
def test_the_models_own_loss_is_divided_by_what_it_counts(pool: Pool, size: int, plan: str) -> None:
    assert_same("gpt2", pool.run(one_step, size, "gpt2", plan, True))


@pytest.mark.parametrize("kind", CAUSAL)
def test_the_first_loss_is_that_of_transformers(kind: str) -> None:
    model = build(kind).float()
    whole = batch(kind)
    theirs = model(**whole).loss.item()
    with Run("fp32 mb=3", device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert run.step(whole).item() == pytest.approx(theirs, rel=1e-6)


@pytest.mark.wide
def test_random_tokens_cannot_be_learned() -> None:
    """Labels that are the inputs were compared with the logits of the same token, and the model learned to copy."""
    model = build("gpt2")
    with Run("fp32", device="cpu") as run:
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        generator = torch.Generator().manual_seed(0)
        for _ in range(25):
            ids = torch.randint(VOCABULARY, (16, TOKENS), generator=generator)
            loss = run.step({"input_ids": ids, "labels": ids})
    assert loss.item() > 3.3  # ln 41 is 3.7


def refused(kind: str, data: Any, said: str, change: Any = None) -> None:
    model = build(kind)
    if change is not None:
        change(model)
    with Run("fp32 mb=2", device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(ShoalError, match=said):
            run.step(data)


def test_labels_that_are_shifted_already_are_rejected() -> None:
    ids = torch.randint(2, VOCABULARY, (4, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    refused("gpt2", (ids[:, :-1], ids[:, 1:]), "shifted by one already")
    refused("llama", {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}, "shifted by one already")


def test_a_loss_that_is_not_cross_entropy_is_rejected() -> None:
    def smooth(model: Any) -> None:
        model.loss_function = lambda logits, labels, **_: F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
        )

    refused("gpt2", batch("gpt2"), r"the model's own loss .* is not the cross-entropy", smooth)
    ids = batch("gpt2")["input_ids"]
    refused("bert sequence", {"input_ids": ids, "labels": torch.rand(8)}, "whole numbers as labels")
    refused("bert sequence", {"input_ids": ids, "labels": torch.rand(8, 3)}, "whole numbers as labels")
    refused(
        "bert qa", {"input_ids": ids, "start_positions": ids[:, 0] % 4, "end_positions": ids[:, 1] % 4}, "no labels"
    )


def test_a_count_in_the_batch_is_rejected() -> None:
    """Under pp it was ignored."""
    refused("gpt2", {**batch("gpt2"), "num_items_in_batch": torch.full((8,), 30)}, "T105")


def step_with_count(world: World, plan: str) -> list[float | str]:
    """The loss of a step and of an evaluation with a count of the whole batch, and without it."""
    whole = batch("gpt2")
    mine = {name: value[world.rank * (8 // world.size) :][: 8 // world.size] for name, value in whole.items()}
    count = int((whole["labels"][:, 1:] != -100).sum())
    model = build("gpt2").float()
    run = Run(f"fp32 {plan}", world=world, loss=lambda model, batch: model(**batch).loss)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    found: list[float | str] = []
    for step in (lambda batch: run.step(batch).item(), lambda batch: run.evaluate([batch])):
        for extra in ({"num_items_in_batch": count}, {}):
            try:
                found.append(step({**mine, **extra}))
            except ShoalError as error:
                found.append(error.problems[0].code)
    return found


@pytest.mark.parametrize(("size", "plan"), [(1, ""), (1, "mb=4"), (2, "mb=2")])
def test_a_count_in_the_batch_is_rejected_with_a_loss_function_too(pool: Pool, size: int, plan: str) -> None:
    """The loss was divided by the number of microbatches of all ranks: by 1, 2 and 4 here."""
    theirs = pytest.approx(build("gpt2").float()(**batch("gpt2")).loss.item(), rel=1e-5)
    for found in pool.run(step_with_count, size, plan):
        assert found == ["T105", theirs, "T105", theirs]


def test_a_loss_of_routers_is_no_sum_over_microbatches() -> None:
    refused("mixtral", batch("mixtral"), r"of its routers beside the cross-entropy")
    refused("mixtral", batch("mixtral"), r"of its routers beside", lambda model: scale_routers(model, 1e-8))
    model = build("mixtral").float()
    parts = [{name: x[i : i + 4] for name, x in batch("mixtral").items()} for i in (0, 4)]
    sums = [balanced(model, part) for part in parts]
    mean = sum(total.item() for total, _ in sums) / sum(int(count) for _, count in sums)
    with Run("fp32 mb=4", device="cpu", loss=balanced) as run:  # as the fix says
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        assert run.step(batch("mixtral")).item() == pytest.approx(mean, rel=1e-5)


def scale_routers(model: Any, coefficient: float) -> None:
    model.router_aux_loss_coef = coefficient


def test_a_loss_of_routers_times_zero_is_none() -> None:
    model = build("mixtral").float()
    scale_routers(model, 0.0)
    theirs = model(**batch("mixtral")).loss.item()
    with Run("fp32 mb=2", device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        assert run.step(batch("mixtral")).item() == pytest.approx(theirs, rel=1e-5)


def balanced(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    count = (batch["labels"][:, 1:] != -100).sum()
    return model(**batch).loss * count, count


@pytest.mark.parametrize(
    ("kind", "words", "code"),
    [("llama", "cp=2", "M143"), ("mixtral", "sp=on tp=2", "M144"), ("mixtral", "cp=2", "M143")],
)
def test_a_models_own_loss_of_some_tokens_is_rejected(kind: str, words: str, code: str) -> None:
    """It was computed, and was another number."""
    model = build(kind)
    adapt(model, describe(model), Plan.parse(words).resolve(2))
    with rejects(code, words.split()[0]):
        model(**batch(kind))


def test_classes_of_samples_are_not_shifted() -> None:
    model = build("bert sequence")
    assert shifts_labels(model, describe(model)) is False
    model.config.problem_type = "multi_label_classification"
    assert shifts_labels(model, describe(model)) is None


def test_the_convention_of_a_loss_with_other_terms_is_not_known() -> None:
    """Else it would be computed without them: inside the head, under pp, and under cp."""
    model, batched = build("llama"), batch("llama")
    plain = type(model).forward
    assert shifts_labels(model, describe(model)) is True

    class Regularized(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            output = plain(self, input_ids=input_ids, labels=labels, **options)
            if labels is not None:
                output.loss = output.loss + 0.1 * output.logits.logsumexp(-1).pow(2).mean()
            return output

    other = Regularized(model.config)
    assert shifts_labels(other, describe(other)) is None
    with Run("fp32 mb=2", device="cpu", fused_loss=True) as run:
        run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))
        with pytest.raises(ShoalError, match=r"the model's own loss .* is not the cross-entropy"):
            run.step(batched)


@pytest.mark.parametrize("words", ["pp=2 mb=1", "cp=2"])
def test_where_the_models_own_loss_cannot_be_seen_it_is_rejected(words: str) -> None:
    plan = Plan.parse(words).resolve(2)
    with pytest.raises(ShoalError, match=words.partition(" ")[0]):
        rule_under(plan, LabelRule.of(build("gpt2")))
    assert rule_under(plan, LabelRule.of(nn.Linear(2, 2))).is_shifted is False


def test_what_is_computed_from_one_token_is_rejected_under_cp() -> None:
    """Each rank would take its own first token for the first one of the sequence."""
    assert "computes logits from some tokens" in describe(build("bert sequence")).why_not["cp"]
    assert "cp" not in describe(build("bert tokens")).why_not
    assert "cp" not in describe(build("bert mlm")).why_not


class Around(nn.Module):
    """A module of a user's own around a language model: it passes on what it gets, or no labels, or changes logits."""

    def __init__(self, inner: nn.Module, way: str) -> None:
        super().__init__()
        self.inner, self.way = inner, way
        if way == "no labels":
            self.forward = self.without_labels  # type: ignore[method-assign]

    def forward(self, **batch: Any) -> Any:
        if self.way == "drops labels":
            return self.inner(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        output = self.inner(**batch)
        if self.way == "other logits":
            output.logits = output.logits * 9.0
        return output

    def without_labels(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits


def loss_around(way: str, whole: dict[str, Tensor]) -> float:
    model = Around(build("llama").float(), way)
    with Run("fp32 mb=2", device="cpu") as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        return run.step(whole).item()


def test_a_model_inside_of_another_keeps_its_convention() -> None:
    """A forward that takes **batch got no labels, and learned to copy its tokens."""
    whole = batch("llama")
    theirs = build("llama").float()(**whole).loss.item()
    assert loss_around("passes all", whole) == pytest.approx(theirs, rel=1e-6)
    shifted_by_hand = {**whole, "labels": F.pad(whole["labels"][:, 1:], (0, 1), value=-100)}
    for way in ("no labels", "drops labels"):
        with rejects("T015", "labels=None"):
            loss_around(way, whole)
        assert loss_around(way, shifted_by_hand) == pytest.approx(theirs, rel=1e-6)


def test_the_loss_of_other_logits_is_rejected() -> None:
    """Its targets are the labels, so it was taken for the loss of the logits that are returned."""
    with rejects("T014", "the logits that it returns"):
        loss_around("other logits", batch("llama"))


def weighted() -> nn.Module:
    """A GPT-2 whose own loss weights classes."""
    model: Any = build("gpt2").float()
    weights = torch.arange(1.0, VOCABULARY + 1)
    model.loss_function = lambda logits, labels, **_: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), weight=weights
    )
    return model


def one_weighted_step(world: World, plan: str, options: dict[str, Any], mine: dict[str, Tensor]) -> float:
    run = Run(f"fp32 {plan}", world=world, **options)
    model = weighted()
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    return run.step(mine).item()


def said_of_weights(world: World, plan: str, options: dict[str, Any]) -> tuple[str, float]:
    """What a run says of class weights, and the loss of a run with the loss function that it says."""
    mine = {name: value[world.rank * 4 :][:4] for name, value in batch("gpt2").items()}
    ones = {**mine, "labels": torch.ones_like(mine["labels"])}
    with pytest.raises(ShoalError) as caught:
        one_weighted_step(world, plan, options, ones)
    own = {**options, "loss": lambda model, batch: model(**batch).loss}
    return str(caught.value), one_weighted_step(world, plan, own, mine)


@pytest.mark.parametrize(("plan", "options"), [("", {"find_unused_parameters": True}), ("zero=3 mb=2", {})])
def test_class_weights_are_seen_on_every_rank(pool: Pool, plan: str, options: dict[str, Any]) -> None:
    """torch's DDP hid them behind a node of its own, and all labels have one class, for which weights cancel."""
    theirs = weighted()(**batch("gpt2")).loss.item()
    for said, loss in pool.run(said_of_weights, 2, plan, options):
        assert "T014" in said
        assert "weights classes" in said
        assert loss == pytest.approx(theirs, rel=1e-5)
