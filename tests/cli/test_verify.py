"""`shoal verify` as a user meets it: the proof, its JSON, exit codes, a model of one's own, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.cli import main
from shoal.cli import verify as verify_command
from shoal.config.load import load_recipe
from shoal.errors import ShoalError
from shoal.verification.api import _notes
from shoal.verification.options import RecipeSettings
from shoal.verification.recipe.cases import case_of
from tests.readme.fork_host import Ran, run_commands
from tests.rejects import rejects

pytestmark = pytest.mark.timeout(300)  # the first test that asks for `ran` waits for all its commands

KEYS = {
    *(
        "equal",
        "plan",
        "ranks",
        "worst",
        "first_difference",
        "bytes",
        "collectives",
        "memory",
        "compression_error",
        "replica_sync",
        "notes",
        "tolerance",
        "steps",
        "seconds",
    ),
}


OWN = """
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3072, 16), nn.Linear(16, 256)
    def forward(self, images):
        return self.second(self.first(images.flatten(1)).relu())
def build():
    return Own()
"""


OF_IMAGES = [
    *(
        "--model.name",
        "OWN",
        "--data.source",
        "synthetic",
        "--data.synthetic_kind",
        "images",
        "--data.global_batch",
        "8",
    ),
    "--json",
]
COMMANDS = {
    "composed": ["--nproc", "4", "--plan", "tp=2 pp=2 zero=1 1f1b mb=1", "--json"],
    "strict": ["--nproc", "2", "--steps", "1", "--plan", "zero=3 mb=1", "--tolerance", "1e-30", "--json"],
    "compressed": ["--nproc", "2", "--steps", "1", "--plan", "compress=int8 mb=4", "--json"],
    "local SGD": ["--nproc", "2", "--steps", "1", "--plan", "sync=diloco:50 compress=int8 mb=4", "--json"],
    "local SGD for reading": ["--nproc", "2", "--steps", "1", "--plan", "sync=local:4 mb=4"],
    "for reading": ["--nproc", "2", "--steps", "1", "--plan", "dp_replicate=2 mb=2"],
    "own": ["--nproc", "2", "--plan", "zero=3 mb=2", *OF_IMAGES],
    "matrix": ["--matrix", "--nproc", "2", "--steps", "1", *OF_IMAGES],
}
if os.environ.get("SHOAL_ALL"):
    sharded = "dp_replicate=2 zero=3 compress=powersgd:2 mb=4"
    COMMANDS["sharded and compressed"] = ["--nproc", "4", "--steps", "1", "--plan", sharded, "--json"]
    COMMANDS["in 8 bits"] = ["--nproc", "1", "--plan", "fp8 mb=4", "--steps", "1"]
    COMMANDS["matrix of a llama"] = ["--matrix", "--nproc", "2", "--steps", "1", "--json"]


def run_all() -> dict[str, Ran]:
    """What became of them, each in a process that can still be forked, as a user's is: this one has computed, and every
    rank that it starts has to load torch."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder, "own.py")
        own.write_text(OWN)
        commands = [["verify", *(word.replace("OWN", f"{own}:build") for word in words)] for words in COMMANDS.values()]
        return dict(zip(COMMANDS, run_commands(commands, timeout=280), strict=True))


@pytest.fixture(scope="module")
def ran(once: Callable[..., Any]) -> dict[str, Ran]:
    outcomes: dict[str, Ran] = once(run_all)
    return outcomes


def verified(ran: Ran) -> tuple[int, dict[str, Any]]:
    return ran.code, json.loads(ran.stdout)


def test_the_proof_of_a_composed_plan(ran: dict[str, Ran]) -> None:
    code, told = verified(ran["composed"])
    assert code == 0
    assert told.keys() == KEYS
    assert told["equal"] is True
    assert told["first_difference"] is None
    assert told["ranks"] == 4
    assert {"loss", "grad", "weight", "tensor"} <= told["worst"].keys()
    assert max(told["worst"][key] for key in ("loss", "grad", "weight")) <= 1e-10
    assert told["bytes"].keys() == {"tp", "pp"}
    for count in told["bytes"].values():
        assert count["predicted"] == count["counted"] > 0
    for cause in ("parameters", "gradients"):
        assert told["memory"][cause]["predicted"] == told["memory"][cause]["counted"]
    assert told["memory"]["peak"]["measured"] > 2**20


def test_a_tolerance_that_nothing_meets(ran: dict[str, Ran]) -> None:
    code, told = verified(ran["strict"])
    assert code == 1
    assert told["equal"] is False
    assert told["first_difference"]["cause"]


def test_what_travels_is_that_of_the_plan_as_it_was_asked_for(ran: dict[str, Ran]) -> None:
    """And not of the one without compression, whose equality is proven beside it."""
    of = {"compressed": {"dp_replicate"}, "sharded and compressed": {"dp_replicate", "dp_shard"}}
    for name in of.keys() & COMMANDS:
        code, told = verified(ran[name])
        assert code == 0
        assert told.keys() == KEYS
        assert told["compression_error"]["is_within_bound"] is True
        assert told["replica_sync"] == {
            "axis": "dp_replicate",
            "every": 1,
            "has_equal_weights": True,
            "sends_weights": False,
        }
        assert told["bytes"].keys() == of[name]
        assert "dp_replicate" not in told["collectives"]
        for count in told["bytes"].values():
            assert count["predicted"] == count["counted"] > 0
    parameters = verified(ran["compressed"])[1]["memory"]["parameters"]["counted"]
    sent = verified(ran["compressed"])[1]["bytes"]["dp_replicate"]["counted"]
    assert 2 * parameters / 8 < sent < 2 * parameters / 7  # a byte of eight, and scales; from two ranks


def test_local_sgd_is_not_called_equal(ran: dict[str, Ran]) -> None:
    code, told = verified(ran["local SGD"])
    assert code == 0
    assert told["replica_sync"] == {
        "axis": "dp_replicate",
        "every": 50,
        "has_equal_weights": True,
        "sends_weights": True,
    }
    assert told["bytes"]["dp_replicate"] == verified(ran["compressed"])[1]["bytes"]["dp_replicate"]
    out = ran["local SGD for reading"].stdout
    assert ran["local SGD for reading"].code == 0
    assert out.startswith("local SGD")
    assert "bytes sent, every 4 steps" in out
    assert "after a sync their weights are equal" in " ".join(out.split())


def test_it_can_be_read(ran: dict[str, Ran]) -> None:
    assert ran["for reading"].code == 0
    out = ran["for reading"].stdout
    assert "computes the same as one process" in out
    assert "dp_replicate" in out
    assert "predicted" in out
    assert "counted" in out
    assert max(map(len, out.splitlines())) <= 100


def test_the_matrix_of_a_model_that_says_nothing(ran: dict[str, Ran]) -> None:
    """It is every plan that needs no word of the model. Which plans there are of a model that describes itself, is told
    by tests/unit/test_validation.py, and that each computes the same by tests/dist/test_layouts.py."""
    code, told = verified(ran["matrix"])
    assert code == 0
    assert told["equal"] is True
    plans = [proof["plan"] for proof in told["results"]]
    words = ("dp_replicate=2", "zero=1", "zero=2", "zero=3")
    assert [next(word for word in words if word in plan) for plan in plans] == list(words)
    assert all(count["predicted"] == count["counted"] for p in told["results"] for count in p["bytes"].values())
    assert ran["matrix"].stderr.count("/4  ") == 4


@pytest.mark.wide
def test_the_matrix_of_two_ranks(ran: dict[str, Ran]) -> None:
    code, told = verified(ran["matrix of a llama"])
    assert code == 0
    assert told["equal"] is True
    plans = " ".join(proof["plan"] for proof in told["results"])
    for word in (
        "dp_replicate=2",
        "zero=1",
        "zero=2",
        "zero=3",
        "sp=on",
        "sp=off",
        "ring",
        "ulysses",
        "gpipe",
        "1f1b",
        "zbv",
        "dualpipev",
    ):
        assert word in plans
    assert all(count["predicted"] == count["counted"] for p in told["results"] for count in p["bytes"].values())


def test_a_recipe_of_ones_own_at_its_full_size(ran: dict[str, Ran]) -> None:
    code, told = verified(ran["own"])
    assert code == 0, told


@pytest.mark.wide
def test_a_precision_that_was_not_looked_at_is_told(ran: dict[str, Ran]) -> None:
    ended = ran["in 8 bits"]
    assert ended.code == 0
    assert "fp8 was not verified: the layout was, in fp64" in ended.stdout


@pytest.mark.parametrize(
    ("plan", "precision", "note"),
    [
        ("bf16", None, "bf16 was not verified: the layout was, in fp64; --precision bf16 verifies it"),
        ("fp16", "fp32", "fp16 was not verified: the layout was, in fp32; --precision fp16 verifies it"),
        ("fp8", "bf16", "fp8 was not verified: the layout was, in bf16"),
        ("bf16", "bf16", None),
        ("fp32", None, None),
    ],
)
def test_which_precisions_are_told_of(plan: str, precision: str | None, note: str | None) -> None:
    recipe = load_recipe(None, [("plan", plan), ("launch.device", "cpu")])
    notes = list(_notes(case_of(recipe, 1, RecipeSettings(precision=precision))))
    assert notes == ([] if note is None else [note])


@pytest.mark.parametrize("offload", ["optimizer", "parameters"])
def test_offload_on_a_cpu_is_not_called_verified(capfd: pytest.CaptureFixture[str], offload: str) -> None:
    """On a CPU offload changes nothing, so "equal" says nothing of it: the text and the JSON say so."""
    note = f"offload={offload} was not verified: it has no effect on a CPU"
    words = ["verify", "--plan", f"zero=1 offload={offload}", "--nproc", "1", "--device", "cpu", "--steps", "1"]
    assert main(words) == 0
    assert note in " ".join(capfd.readouterr().out.split())
    assert main([*words, "--json"]) == 0
    assert any(one.startswith(note) for one in json.loads(capfd.readouterr().out)["notes"])


@pytest.mark.parametrize(
    ("said", "note"),
    [
        ([("run.compile", "true")], "run.compile true was not verified: the layout was"),
        (
            [("run.loss", "plain"), ("optim.state_dtype", "bf16")],
            "run.loss plain and optim.state_dtype bf16 were not verified: the layout was",
        ),
        ([("run.compile", "false"), ("run.seed", "3")], None),
    ],
)
def test_settings_that_were_not_looked_at_are_told(said: list[tuple[str, str]], note: str | None) -> None:
    recipe = load_recipe(None, [("launch.device", "cpu"), *said])
    assert list(_notes(case_of(recipe, 1, RecipeSettings()))) == ([] if note is None else [note])


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (["--nproc", "4", "--plan", "tp=4 mb=1"], "tp=4 does not divide num_kv_heads=2", "tp=1 or 2"),
        (["--nproc", "5", "--plan", "pp=5 mb=1"], "more than the 4 blocks of the model", "pp=1, 2, 3 or 4"),
        (["--nproc", "3", "--plan", "tp=2"], "does not divide the number of ranks", "--nproc 2"),
        (["--nproc", "4", "--plan", "pp=4 1f1b mb=4", "--data.global_batch", "8"], "2 microbatches", "mb"),
        (["--nproc", "2", "--plan", "pp=2 zbv mb=1 recompute=full"], "recompute a block", "recompute=none"),
        (["--nproc", "2", "--plan", "zero=3", "--precision", "fp7"], "got 'fp7'", "fp64"),
        (["--nproc", "2", "--plan", "fp8 tp=2"], "1 problem in plan 'tp=2 zero=0 fp8'", "bf16 instead of fp8"),
        (["--nproc", "1", "--plan", "fp8", "--model.name", "OWN"], "fp8 needs blocks", "def describe"),
        (["--nproc", "2", "--plan", "pp=2", "--model.name", "OWN"], "but the model describes none", "def describe"),
        (
            ["--nproc", "2", "--plan", "tp=2", "--model.name", "OWN"],
            "model describes no splits",
            "Split.COLUMN",
        ),
        (
            ["--nproc", "2", "--plan", "tp=2", "--model.name", "mlp"],
            "no split of layers.*.linear",
            "Split.SEQUENCE",
        ),
    ],
)
def test_refused_before_a_process_starts(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    what: str,
    fix: str,
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = [word.replace("OWN", f"{tmp_path}/own.py:build") for word in words]
    monkeypatch.setattr("shoal.verification.api.launch", lambda *_, **__: pytest.fail("a process was started"))
    assert main(["verify", *words]) == 2
    told = capsys.readouterr().err
    assert what in told
    assert fix in told


# ---- through the API ------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """A module of the user's own, which says nothing about itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x * self.scale


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def test_a_module_of_ones_own() -> None:
    torch.manual_seed(1)
    batch = (torch.randn(8, 6), torch.randn(8, 6))
    for plan in ("dp_shard=2 zero=3 mb=2", "dp_replicate=2 mb=2"):
        proof = shoal.verify(Mixer, batch, plan, loss=squared)
        assert proof.equal, proof.cause
        assert proof.verdict.worst.grad < 1e-12


def test_a_module_that_says_nothing_cannot_be_cut() -> None:
    with rejects("P065", "scale is a parameter of no module"):
        shoal.verify(functools.partial(Mixer), (torch.randn(8, 6), torch.randn(8, 6)), "pp=2 mb=2", loss=squared)


def test_how_many_ranks_is_said() -> None:
    with pytest.raises(ShoalError, match="must have a degree, or nproc must be set"):
        shoal.verify(Mixer, (torch.randn(8, 6), torch.randn(8, 6)), "mb=2", loss=squared)


def test_an_argument_that_verify_does_not_have() -> None:
    batch = (torch.randn(8, 6), torch.randn(8, 6))
    with rejects("V005", "toleranc", "tolerance=0"):
        shoal.verify(Mixer, batch, "dp_shard=2", toleranc=0)  # type: ignore[call-arg]
    proof = shoal.verify(Mixer, batch, "dp_shard=2", loss=squared, steps=1, lr=0.1, clip=None, seed=3, tolerance=1e-9)
    assert proof.equal, proof.cause
    assert len(proof.verdict.steps) == 1


def test_a_matrix_of_no_layout_is_not_called_equal() -> None:
    images = ["--model.name", "mlp", "--data.source", "synthetic", "--data.synthetic_kind", "images"]
    with rejects("V006", "7 ranks"):
        verify_command.main(["--matrix", "--nproc", "7", *images, "--data.global_batch", "32"])


@pytest.mark.parametrize(("words", "ranks"), [("cp=2", 2), ("tp=2 cp=2", 4)])
def test_the_degrees_of_a_plan_say_how_many_ranks_there_are(words: str, ranks: int) -> None:
    assert verify_command._num_ranks(load_recipe(None, [("plan", words)])) == ranks
