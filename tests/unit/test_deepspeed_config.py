"""A `ds_config.json` becomes a plan and settings, key by key; what has no counterpart is rejected with the nearest
thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.blueprint.plan import Plan
from shoal.config.deepspeed.translate import translate
from shoal.config.deepspeed.translation import Target, Translation
from shoal.config.load import read_recipe
from tests.unit.deepspeed_shapes import SHAPES, Shape


def translated(config: Any, target: Target = "train", num_ranks: int | None = 8) -> Translation:
    return translate(config, target=target, num_ranks=num_ranks)


def codes(found: Translation) -> list[str]:
    return sorted(problem.code for problem in found.problems)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_shapes_of_the_real_world(shape: Shape) -> None:
    found = translated(shape.config, num_ranks=shape.ranks)
    assert codes(found) == sorted(shape.codes), [str(problem) for problem in found.problems]
    words = {key: value for key, value in found.plan.items() if value is not None}
    if not shape.codes:
        assert str(Plan.of(words)) == str(Plan.parse(shape.plan))
        reading = read_recipe(None, found.overrides())
        assert not reading.problems, reading.problems
        for key, value in shape.settings.items():
            assert found.settings[key] == value, key
        named = [line.key for line in found.lines]
        assert len(set(named)) == len(named), "something is said twice"
        for key in _leaves(shape.config):
            assert any(key == name or key.startswith(f"{name}.") for name in named), f"nothing is said of {key}"


def _leaves(config: dict[str, Any], prefix: str = "") -> list[str]:
    """Every key with a value of its own."""
    found = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            found += _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            found.append(f"{prefix}{key}")
    return found


def test_there_are_forty_shapes_of_which_some_are_rejected() -> None:
    assert len(SHAPES) >= 40
    assert len({shape.name for shape in SHAPES}) == len(SHAPES)
    assert sum(bool(shape.codes) for shape in SHAPES) >= 12


def test_all_problems_are_reported_at_once() -> None:
    config = {
        "train_batch_size": 10,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_acumulation_steps": 1,
        "zero_optimization": {"stage": 7, "offload_param": {"device": "nvme"}},
        "optimizer": {"type": "Lamb", "params": {"lr": -1}},
        "fp16": {"enabled": True},
        "bf16": {"enabled": True},
    }
    found = translated(config, num_ranks=2)
    assert codes(found) == ["E004", "E006", "E008", "E009", "E011", "E012"]
    text = "\n".join(map(str, found.problems))
    assert "train_batch_size 10 is no multiple of train_micro_batch_size_per_gpu 4 x ranks 2 = 8" in text
    assert '"gradient_accumulation_steps"' in text


def test_contradicting_batch_sizes_are_shown_with_the_arithmetic() -> None:
    config = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}
    [problem] = translated(config, num_ranks=8).problems
    assert "train_batch_size 64 is not" in problem.what
    assert "4 x gradient_accumulation_steps 4 x ranks 8 = 128" in problem.what
    assert '"train_batch_size": 128' in problem.fix


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_batch_follows_from_the_ranks(ranks: int) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    found = translated(config, num_ranks=ranks)
    assert found.settings["data.global_batch"] == 6 * ranks
    assert found.num_accumulated == 3
    assert codes(translated(config, num_ranks=None)) == ["E007"]


def test_traps_of_the_defaults() -> None:
    adam = translated({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}})
    assert adam.settings["optim.name"] == "adamw"  # adam_w_mode is true by default
    assert adam.settings["optim.weight_decay"] == 0.0
    assert adam.settings["optim.betas"] == [0.9, 0.999]
    by_torch = translated({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, "initialize")
    assert by_torch.optimizer is not None
    assert by_torch.optimizer.arguments["weight_decay"] == 0.01
    fp16 = translated({"fp16": {"enabled": True}})
    assert fp16.settings["optim.loss_scale_window"] == 1000
    clip = translated({"train_batch_size": 8}, "initialize")
    assert clip.settings["optim.clip"] == 1.0
    decay = translated({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}}, "initialize")
    assert decay.schedule is not None
    assert decay.schedule.arguments["warmup_max_lr"] == 1e-3
    assert decay.schedule.arguments["warmup_type"] == "log"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"a": 1, "a": 2}', "E002"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "E002"),
        ("[1]", "E003"),
        ("{train_batch_size: 8}", "R021"),
        ('{"train_batch_size": 8, // hjson\n}', "R021"),
        ("{" * 3, "R021"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    assert codes(translated(path)) == [code]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    [problem] = translated(tmp_path / "ds_confg.json").problems
    assert problem.code == "E001"
    assert "ds_config.json" in problem.fix


def test_auto_stays_open() -> None:
    config = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    found = translated(config)
    assert not found.problems
    assert not found.settings
    assert [line.remark for line in found.lines] == ["left open"] * 3
    json.dumps([line.to_mapping() for line in found.lines])


ODD = [None, True, False, 0, -1, 2.5, 1e400, "", "auto", "x", [], [1], {}, {"a": 1}, {"enabled": 1}, [[["x"]]]]


@pytest.mark.parametrize(
    "target", ["train", *(pytest.param(one, marks=pytest.mark.wide) for one in ("plan", "initialize"))]
)
def test_any_value_of_any_key_is_translated_or_rejected(target: Target) -> None:
    """Each key of each shape, with odd values in its place: problems, never an exception."""
    seen = set()
    for shape in SHAPES:
        for path in _paths(shape.config):
            if path in seen:
                continue
            seen.add(path)
            for odd in ODD:
                found = translated(_with(shape.config, path, odd), target)
                assert all(problem.what and problem.fix for problem in found.problems)
                found.overrides()
    assert len(seen) > 100


def _paths(config: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = [_paths(value, (*above, key)) for key, value in config.items() if isinstance(value, dict)]
    return [(*above, key) for key in config] + [path for paths in inner for path in paths]


def _with(config: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = path
    return {**config, first: _with(config[first], tuple(rest), value) if rest else value}


def test_gradients_are_rounded_as_deepspeed_does_at_stage_zero_in_bf16() -> None:
    def rounds(target: Target = "initialize", sums: str | None = None, stage: int = 0, **precision: Any) -> bool:
        config: dict[str, Any] = {"train_batch_size": 8, "zero_optimization": {"stage": stage}, **precision}
        config |= {} if sums is None else {"data_types": {"grad_accum_dtype": sums}}
        found = translated(config, target)
        assert not found.problems
        return found.rounds_gradients

    on: dict[str, Any] = {"enabled": True}
    assert rounds(bf16=on)
    assert rounds(bf16=on, sums="bfloat16")
    assert not rounds(bf16=on, sums="fp32")
    assert not rounds(bf16=on, stage=1)
    assert not rounds("train", bf16=on)
    assert not rounds(fp16=on)
    assert not rounds(torch_autocast=on)
    assert not rounds()


def test_what_a_plan_chooses_is_said() -> None:
    """DeepSpeed has defaults for it, and the planner none."""
    said = {line.key: line.remark for line in translated({"train_batch_size": 8}, "plan").lines}
    assert said["zero_optimization"].endswith("stage 0: --zero 0")
    assert "fp32" in said["bf16"]
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
    for target in ("plan", "train"):
        assert not {"zero_optimization", "bf16"} & {line.key for line in translated(config, target).lines}


def test_data_types() -> None:
    config = {"train_batch_size": 8, "bf16": {"enabled": True}}
    types = {"param_dtype": "fp32", "buffer_dtype": "bf16", "keep_in_fp32_modules": "auto", "grad_dtype": "fp32"}
    found = translated({**config, "data_types": types})
    assert codes(found) == ["E004", "E008", "E011"]
    assert "data_types.param_dtype is 'fp32', and the precision of the config is bf16" in str(found.problems)
    types = {"param_dtype": "torch.bfloat16", "buffer_dtype": "float32", "keep_in_fp32_modules": "auto"}
    found = translated({**config, "data_types": types}, "initialize")
    assert not found.problems
    assert not any(line.value == "auto" and line.remark == "left open" for line in found.lines)


def test_an_open_batch_follows_from_the_others_or_its_steps_are_said_to_have_no_effect() -> None:
    micro, steps, total = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"
    found = translated({total: "auto", micro: 4, steps: 3}, num_ranks=2)
    assert (found.settings["data.global_batch"], found.plan["mb"]) == (24, 4)
    assert [line.key for line in found.lines].count(total) == 1
    found = translated({total: 24, micro: "auto", steps: 3}, num_ranks=2)
    assert (found.settings["data.global_batch"], found.plan["mb"]) == (24, 4)
    assert [line.key for line in found.lines].count(micro) == 1
    for config, ranks in (({total: "auto", micro: "auto", steps: 3}, 2), ({total: "auto", micro: 4, steps: 3}, None)):
        found = translated(config, num_ranks=ranks)
        assert not found.problems
        assert "data.global_batch" not in found.settings
        [line] = [line for line in found.lines if line.key == steps]
        assert line.remark.startswith("no effect here")
