"""Arguments of Megatron-LM become a plan and options of `shoal plan`, or are rejected by name."""

from __future__ import annotations

import json
from itertools import permutations
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.cli import main
from shoal.config.deepspeed.translation import Translation
from shoal.config.megatron.translate import translate_megatron


def plan_of(text: str, **options: int) -> str:
    found = translate_megatron(text, **options)
    assert not found.problems, found.problems
    return str(Plan.of(found.plan))


def codes(found: Translation) -> list[str]:
    return sorted(problem.code for problem in found.problems)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("", "dp_shard=1 cp=1 tp=1 pp=1 zero=0"),
        ("--bf16 --micro-batch-size 4", "dp_shard=1 cp=1 tp=1 pp=1 zero=0 mb=4 bf16"),
        ("--tensor-model-parallel-size 8 --sequence-parallel", "dp_shard=1 cp=1 tp=8 pp=1 zero=0 sp=on"),
        ("--use-distributed-optimizer --fp16", "dp_replicate=1 cp=1 tp=1 pp=1 zero=1 fp16"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 2", "dp_replicate=2 cp=1 tp=1 pp=1 zero=1"),
        ("--use-torch-fsdp2 --bf16", "dp_replicate=1 cp=1 tp=1 pp=1 zero=3 bf16"),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", "dp_replicate=1 cp=1 tp=1 pp=1 zero=2"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "dp_replicate=1 cp=1 tp=1 pp=1 zero=2"),
        ("--context-parallel-size 4 --cp-comm-type a2a", "dp_shard=1 cp=4 ulysses tp=1 pp=1 zero=0"),
        ("--context-parallel-size=2 --cp_comm_type p2p", "dp_shard=1 cp=2 ring tp=1 pp=1 zero=0"),
        ("--recompute-activations", "dp_shard=1 cp=1 tp=1 pp=1 zero=0 recompute=selective"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "dp_shard=1 cp=1 tp=1 pp=1 zero=0 recompute=full",
        ),
        (
            "--pipeline-model-parallel-size 4 --num-layers 32 --num-layers-per-virtual-pipeline-stage 2",
            "dp_shard=1 cp=1 tp=1 pp=4 zero=0 interleaved v=4",
        ),
        ("--num-experts 8 --expert-model-parallel-size 4 --fp8-format hybrid", "cp=1 tp=1 pp=1 ep=4 zero=0 fp8"),
        (
            "--use-distributed-optimizer --optimizer-cpu-offload",
            "dp_replicate=1 cp=1 tp=1 pp=1 zero=1 offload=optimizer",
        ),
    ],
)
def test_arguments_become_words(text: str, plan: str) -> None:
    assert plan_of(text) == str(Plan.parse(plan))


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--fp8-format hybrid", "--bf16"], "precision", "fp8"),
        (["--fp8-format e4m3", "--fp16"], "precision", "fp8"),
        (
            [
                "--use-megatron-fsdp",
                "--data-parallel-sharding-strategy optim_grads_params",
                "--use-distributed-optimizer",
            ],
            "zero",
            3,
        ),
        (["--use-megatron-fsdp", "--use-distributed-optimizer"], "zero", 3),
        (["--use-torch-fsdp2", "--use-distributed-optimizer"], "zero", 3),
        (["--recompute-granularity full", "--recompute-activations"], "recompute", "full"),
        (["--recompute-granularity selective", "--recompute-activations"], "recompute", "selective"),
    ],
)
def test_the_order_of_arguments_changes_nothing(arguments: list[str], key: str, value: Any) -> None:
    for order in permutations(arguments):
        found = translate_megatron(" ".join(order))
        assert not found.problems
        assert found.plan[key] == value
        said = {line.flag for line in found.lines if line.flag.startswith(f"--plan.{key} ")}
        assert said <= {f"--plan.{key} {value}"}


def test_a_vocabulary_with_padding_is_the_larger_one() -> None:
    for order in permutations(["--vocab-size 1000", "--padded-vocab-size 1024"]):
        assert translate_megatron(" ".join(order)).settings["vocabulary"] == 1024


def test_arguments_that_exclude_each_other() -> None:
    assert codes(translate_megatron("--cp-comm-type p2p --cp-comm-type a2a")) == ["E061"]
    [problem] = translate_megatron("--fp16 --bf16").problems
    assert (problem.code, problem.what) == ("E061", "--bf16 and --fp16 exclude each other")


def test_every_problem_is_reported_by_name() -> None:
    text = (
        "pretrain_gpt.py --tensor-model-parallel-sise 2 --micro-batch-size two --rampup-batch-size 32 32 1000"
        " --cp-comm-type all_gather --recompute-method block --recompute-num-layers 4 --lr 1e-3 --lr 2e-3"
        " --frobnicate 1"
    )
    found = translate_megatron(text)
    assert codes(found) == ["E060", "E060", "E061", "E061", "E062", "E062", "E062"]
    written = "\n".join(map(str, found.problems))
    assert "--tensor-model-parallel-size" in written
    assert "--lr is given twice: 1e-3 and 2e-3" in written


@pytest.mark.parametrize(
    "flag", ["--bf16", "--sequence-parallel", "--use-distributed-optimizer", "--swiglu", "--use-megatron-fsdp"]
)
def test_a_switch_has_no_value(flag: str) -> None:
    """It is on by being there: `--bf16 false` would switch it on."""
    for text in (f"{flag} false --num-layers 4", f"{flag}=0"):
        [problem] = translate_megatron(text).problems
        assert (problem.code, problem.what.split(",")[0]) == ("E061", f"{flag} takes no value")


@pytest.mark.parametrize("text", ["-tp 2", "tensor-model-parallel-size 2", "pretrain_gpt.py"])
def test_words_without_an_argument_are_rejected(text: str) -> None:
    [problem] = translate_megatron(text).problems
    assert problem.code == "E061"
    assert repr(text) in problem.what


def test_a_command_with_its_launcher_and_continued_lines() -> None:
    text = """torchrun --nnodes 2 --nproc-per-node=8 pretrain_gpt.py \\
        --tensor-model-parallel-size 2 \\
        --micro-batch-size 4"""
    assert plan_of(text) == str(Plan.parse("dp_shard=1 cp=1 tp=2 pp=1 zero=0 mb=4"))
    found = translate_megatron("--tensor-model-parallel-size 2 --config-logger-dir a.py --bf16")
    assert codes(found) == ["E060"]  # a value that looks like a script hides nothing before it
    assert (found.plan["tp"], found.plan["precision"]) == (2, "bf16")


@pytest.mark.parametrize(
    ("text", "zero"),
    [
        ("--data-parallel-sharding-strategy optim_grads_params", 0),  # which Megatron-LM does not read then
        ("--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer", 1),
        ("--data-parallel-sharding-strategy no_shard --use-distributed-optimizer --use-megatron-fsdp", 0),
        ("--data-parallel-sharding-strategy optim --use-custom-fsdp", 1),
        ("--use-distributed-optimizer --use-custom-fsdp", 3),
    ],
)
def test_what_megatron_fsdp_shards(text: str, zero: int) -> None:
    found = translate_megatron(text)
    assert not found.problems
    assert found.plan["zero"] == zero
    assert {line.flag for line in found.lines if line.flag} <= {f"--plan.zero {zero}"}
    assert codes(translate_megatron("--use-megatron-fsdp --data-parallel-sharding-strategy all")) == ["E062"]


def test_sizes_that_contradict_each_other() -> None:
    text = "--tensor-model-parallel-size 2 --micro-batch-size 4 --global-batch-size 100"
    [problem] = translate_megatron(text, num_ranks=16).problems
    assert problem.code == "E063"
    assert "100 is no multiple of --micro-batch-size 4 x 8 data-parallel ranks" in problem.what
    assert "--global-batch-size 96" in problem.fix
    assert codes(translate_megatron("--num-layers 10 --num-layers-per-virtual-pipeline-stage 3")) == ["E063"]


def test_recomputation_that_is_left_open_is_said() -> None:
    text = "--num-layers 4 --hidden-size 64 --num-attention-heads 4"
    said = {line.key: line.remark for line in translate_megatron(text).lines}
    assert said["--recompute-granularity"].endswith("--recompute none")
    lines = translate_megatron(f"{text} --recompute-granularity full").lines
    assert [line.flag for line in lines if line.key == "--recompute-granularity"] == ["--plan.recompute full"]


def test_the_batch_is_one_microbatch_on_each_data_parallel_rank_by_default() -> None:
    text = "--tensor-model-parallel-size 2 --micro-batch-size 4"
    found = translate_megatron(text, num_ranks=16)
    assert found.settings["global_batch"] == 32
    assert [line.flag for line in found.lines if line.key == "--global-batch-size"] == ["--global-batch 32"]
    assert "global_batch" not in translate_megatron("--tensor-model-parallel-size 2", num_ranks=16).settings
    assert "global_batch" not in translate_megatron(text).settings


def test_the_command_takes_a_model_and_its_batch(capsys: pytest.CaptureFixture[str]) -> None:
    text = "--num-layers 16 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --global-batch-size 64 --bf16"
    words = ["plan", "--cluster", "h100:8", "--megatron", f"{text} --use-distributed-optimizer --micro-batch-size 2"]
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["plans"][0]["plan"].startswith("dp_replicate=1 dp_shard=8")
    assert next(line["setting"] for line in answer["translated"]) == "--layers 16"
    assert main([*words, "--mb", "4", "--top", "1"]) == 0
    printed = capsys.readouterr()
    assert "overridden by --plan.mb" in printed.err
    assert "mb=4" in printed.out


GPT2 = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 1024 --vocab-size 50257"
LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8"
    " --ffn-hidden-size 14336 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights"
    " --normalization RMSNorm --position-embedding-type rope --max-position-embeddings 8192 --vocab-size 128256"
)


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        (GPT2, 124_475_904),  # 124,439,808, and 47 rows of padding
        (f"{GPT2} --num-query-groups 4", 124_475_904),  # which is not read without --group-query-attention
        (f"{GPT2} --make-vocab-size-divisible-by 1", 124_439_808),
        (LLAMA, 8_030_261_248),
    ],
)
def test_the_model_is_the_one_that_the_arguments_describe(capsys: Any, text: str, parameters: int) -> None:
    assert (
        main(["plan", "--cluster", "h100:8", "--json", "--megatron", f"{text} --bf16 --use-distributed-optimizer"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["parameters"] == parameters


def test_experts_of_megatron() -> None:
    found = translate_megatron(f"{LLAMA} --num-experts 8 --moe-layer-freq ([0]*1+[1]*31) --moe-ffn-hidden-size 512")
    assert (found.settings["top_k"], found.form["dense_layers"], found.settings["expert_ffn"]) == (2, 1, 512)
    assert codes(translate_megatron(f"{LLAMA} --num-experts 8 --moe-layer-freq 2")) == ["E062"]
    assert codes(translate_megatron(f"{LLAMA} --kv-channels many")) == ["E061"]


@pytest.mark.parametrize("name", ["hidden", "layers", "kv-heads", "vocabulary", "experts"])
def test_negative_dimensions_are_rejected(capsys: Any, name: str) -> None:
    sizes = {"hidden": 64, "layers": 2, "heads": 2, name: -3}
    words = [word for key, value in sizes.items() for word in (f"--{key}", str(value))]
    assert main(["plan", "--cluster", "h100:8", *words]) == 2
    error = capsys.readouterr().err
    assert "Q001" in error
    assert f"--{name} -3" in error
