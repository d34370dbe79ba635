"""Options of other systems are answered with what to type here, and that parses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.cli.overrides import parse
from shoal.cli.train import Train
from shoal.config.flag_aliases import FLAGS, instead_of


def words_of(fix: str) -> list[str]:
    """The proposal without its remark, as words behind `shoal train`."""
    command = fix.partition("  # ")[0]
    return [word for word in shlex.split(command.rpartition("shoal train ")[2]) if word != "recipe.yaml"]


@pytest.mark.parametrize("flag", FLAGS)
def test_every_proposal_parses(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    fix = instead_of(flag)
    assert fix is not None
    assert "{" not in fix
    assert parse(Train, words_of(fix), prog="shoal train")[1].problems == ()


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_is_answered_with_its_proposal(flag: str) -> None:
    for spelling in (f"--{flag}", f"--{flag.replace('_', '-')}"):
        _, reading = parse(Train, [spelling], prog="shoal train")
        assert reading.problems[0].fix == instead_of(flag)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("--fsdp", "--plan zero=3"),
        ("--fsdp full_shard", "--plan zero=3"),
        ("--wandb", "--run.trackers wandb"),
        ("--nproc-per-node 4", "--nproc 4"),
        ("--nproc_per_node=2", "--nproc 2"),
        ("--resume", "--resume latest"),
        ("--resume --json", "--resume latest"),
        ("--lr 1e-3", "--optim.lr 1e-3"),
        ("--learning_rate lots", "--optim.lr 3e-4"),
        ("--epochs 3", "--run.duration 3epoch"),
        ("--max-steps 50", "--run.duration 50step"),
        ("--output_dir out/here", "--run.dir out/here"),
        ("--report_to tensorboard", "--run.trackers tensorboard"),
        ("--tensor-model-parallel-size 8", "--plan.tp 8"),
        ("--parallelism.tensor_parallel_degree 4", "--plan.tp 4"),
        ("--training.seq_len 4096", "--data.seq_len 4096"),
        ("--zero_stage 2", "--plan.zero 2"),
        ("--nnodes 4", "torchrun --nnodes 4"),
        ("--limit_all_gathers true", "--plan zero=3  # FSDP2 frees memory without stopping the host"),
        ("--fsdp_auto_wrap_policy SIZE_BASED_WRAP", "--comm.wrap_classes LlamaDecoderLayer  # or comm.wrap_min_params"),
        ("--fsdp_transformer_layer_cls_to_wrap GPT2Block", "--comm.wrap_classes GPT2Block"),
        ("--fsdp_min_num_params 1000", "--comm.wrap_min_params 1000"),
        ("--fsdp_forward_prefetch true", "--comm.forward_prefetch 1"),
        ("--reduce_dtype fp32", "--comm.reduce_dtype bf16"),
        ("--run.reduce_dtype fp32", "--comm.reduce_dtype fp32"),
        ("--fsdp_mixed_precision bf16", "--plan 'zero=3 bf16'  # units are gathered in bfloat16"),
    ],
)
def test_what_a_newcomer_types(capsys: pytest.CaptureFixture[str], words: str, fix: str) -> None:
    assert main(["train", *words.split()]) == 2
    err = capsys.readouterr().err
    assert f"fix: {fix}" in err
    assert "plan.sp" not in err


def test_what_is_ours_stays_ours(capsys: pytest.CaptureFixture[str]) -> None:
    options, reading = parse(Train, ["--nproc", "2", "--resume", "latest", "--plan", "zero=3"], prog="shoal train")
    recipe = reading.complete()
    assert (options.resume, recipe.launch.nproc, recipe.plan.zero) == ("latest", 2, 3)
    assert main(["train", "--optim.optimizer", "adam"]) == 2
    assert "unknown key 'optim.optimizer'" in capsys.readouterr().err
