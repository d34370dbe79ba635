"""`--model.name hf:FOLDER`: a run starts with the weights of the folder, and its export is such a folder again. A bad
folder is one message, and nothing is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal.cli import main
from shoal.config.recipe import Recipe
from shoal.data.order import sample_ids
from shoal.data.sources.open import open_datasets
from tests.cli.host import Host

pytest.importorskip("transformers")
from tests import huggingface

DATA = {"source": "synthetic", "vocabulary": "41", "seq_len": "8", "global_batch": "4", "validation": "0"}
WORDS = [f"--data.{key}={value}" for key, value in DATA.items()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with several files and an index, as transformers writes it."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    model: Any = huggingface.build("mixtral")
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_a_run_begins_where_the_folder_ends(host: Host, saved: Path, tmp_path: Path) -> None:
    import transformers

    still = ["--optim.lr=1e-30", "--optim.weight_decay=0", "--run.duration=1step", "--run.dir=run"]  # no bit changes
    words = ["train", "--json", f"--model.name=hf:{saved}", "--device=cpu", "--nproc=2", "--plan=zero=3"]
    ran = host.run(*words, *WORDS, *still, cwd=tmp_path)
    assert ran.code == 0, ran.said
    reference = transformers.AutoModelForCausalLM.from_pretrained(saved)
    recipe = Recipe.model_validate({"data": DATA})
    training, _ = open_datasets(recipe.data, 0)
    batch = training.batch(sample_ids(0, len(training), 0, 4))
    with torch.no_grad():
        logits = reference(input_ids=batch["tokens"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert ran.json["loss_first"] == pytest.approx(float(expected), rel=1e-6)
    export = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "huggingface"]
    assert main([*export, "--shard-size", "0.02MB"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(one, back.state_dict()[name]) for name, one in reference.state_dict().items())
    index = "model.safetensors.index.json"
    names = [json.loads((folder / index).read_text())["weight_map"].keys() for folder in (saved, tmp_path / "out")]
    assert names[0] == names[1]
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_a_merged_folder_has_the_buffers_of_its_base(host: Host, tmp_path: Path) -> None:
    """The bias of DeepSeek's router is no parameter, and not what the class begins with."""
    import transformers

    model: Any = huggingface.build("deepseek-v3")
    (name, bias), *_ = [one for one in model.named_buffers() if one[0].endswith("e_score_correction_bias")]
    bias.copy_(torch.arange(1.0, 1 + len(bias)))
    model.save_pretrained(tmp_path / "base")
    words = [
        "train",
        "--json",
        f"--model.name=hf:{tmp_path / 'base'}",
        "--model.lora.rank=2",
        "--device=cpu",
        "--nproc=1",
    ]
    ran = host.run(*words, *WORDS, "--run.duration=1step", "--run.dir=run", cwd=tmp_path)
    assert ran.code == 0, ran.said
    merge = ["checkpoint", "merge", str(tmp_path / "run"), str(tmp_path / "merged"), "--format", "huggingface"]
    assert main(merge) == 0
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(dict(merged.named_buffers())[name].float(), bias.float())


# ---- bad folders ----------------------------------------------------------------------------------------------------


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | changes))

    return change


def change_index(change: Callable[[dict[str, str]], Any]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        said = json.loads(path.read_text())
        change(said["weight_map"])
        path.write_text(json.dumps(said))

    return act


def remove(pattern: str) -> Callable[[Path], None]:
    return lambda folder: [path.unlink() for path in folder.glob(pattern)][:0] and None


def first_file(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def pickled(folder: Path) -> None:
    remove("*.safetensors*")(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")


def with_more_tokens(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"?": 0} | {f"w{number}": number for number in range(1, 60)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


BAD: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "no config": (remove("config.json"), "M070", "config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "C043", "config.json"),
    "no end of layers": (change_config(num_hidden_layers=10**9), "M073", "num_hidden_layers"),
    "config is wrong": (change_config(hidden_size="many"), "M073", "hidden_size"),
    "quantized": (change_config(quantization_config={"bits": 4}), "M076", "quantized"),
    "own code": (change_config(model_type="mine", auto_map={"AutoConfig": "mine.C"}), "M072", "'mine'"),
    "no weights": (remove("*.safetensors*"), "M074", "--model.init random"),
    "pickles": (pickled, "M074", "pytorch_model.bin"),
    "a file is missing": (lambda f: first_file(f).unlink(), "C041", "is not there"),
    "other shapes": (change_config(intermediate_size=20), "M075", "gate_up_proj has the shape [4, 48, 16]"),
    "a tensor is missing": (change_index(lambda m: m.pop("lm_head.weight")), "M075", "lm_head.weight is missing"),
    "an expert is missing": (
        change_index(lambda m: m.pop("model.layers.0.block_sparse_moe.experts.1.w2.weight")),
        "M075",
        "down_proj has the shape [3, 16, 24]",
    ),
    "a tensor too many": (change_config(num_hidden_layers=1), "M075", "model.layers.1"),
    "outside of the folder": (change_index(lambda m: m.update({"lm_head.weight": "../x"})), "C041", "'../x'"),
    "header is cut": (lambda f: first_file(f).write_bytes(first_file(f).read_bytes()[:40]), "C049", "header"),
    "values are cut": (lambda f: first_file(f).write_bytes(first_file(f).read_bytes()[:-4]), "C049", "bytes"),
    "header is no JSON": (lambda f: first_file(f).write_bytes(b"\x02" + bytes(7) + b"{]"), "C049", "not JSON"),
    "tokenizer of another model": (with_more_tokens, "D033", "--data.tokenizer"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_folder_is_one_message(
    case: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, code, what = BAD[case]
    folder = tmp_path / "folder"
    shutil.copytree(saved, folder)
    damage(folder)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("w1 w2 " * 200)
    words = ["--data.source=a.txt", *WORDS[2:]] if case == "tokenizer of another model" else WORDS
    assert main(["train", "--dry-run", f"--model.name=hf:{folder}", "--device=cpu", "--nproc=1", *words]) == 2
    err = capsys.readouterr().err
    assert f"[{code}]" in err, err
    assert what in err
    assert err.count("fix: ") == 1
    assert "Traceback" not in err


def test_text_is_not_taken_for_bytes_where_the_tokenizer_is_missing(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 " * 200)
    words = ["train", "--dry-run", f"--model.name=hf:{saved}", "--device=cpu", "--nproc=1", *WORDS[2:]]
    words = [*words, f"--data.source={tmp_path / 'a.txt'}"]
    for more, is_rejected in (([], True), (["--data.tokenizer=bytes"], False)):
        assert main([*words, *more]) == 2  # as bytes, its tokens are more than the model has (D033)
        assert ("[M080]" in capsys.readouterr().err) is is_rejected


def test_a_folder_without_its_prefix_is_recognised(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in ((["train", "--dry-run", f"--model.name={saved}"], "M001"), (["plan", str(saved)], "Q023")):
        assert main(words) == 2
        err = capsys.readouterr().err
        assert f"[{code}]" in err
        assert f"hf:{saved}" in err


def test_code_of_a_folder_is_run_only_if_it_is_trusted(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(saved, folder)
    change_config(model_type="mine", auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"})(folder)
    (folder / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    words = ["train", "--dry-run", f"--model.name=hf:{folder}", "--device=cpu", "--nproc=1", *WORDS]
    assert main(words) == 2
    assert not (tmp_path / "ran").exists()
    main([*words, "--model.trust_remote_code=true"])
    assert (tmp_path / "ran").exists()


def test_settings_of_a_folder_are_checked(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--dry-run", f"--model.name=hf:{saved}", "--device=cpu", "--nproc=1", *WORDS]
    assert main([*words, "--model.num_layer=1", "--model.init=random"]) == 2
    assert "[M077]" in capsys.readouterr().err
    assert main([*words, "--model.init=zeros"]) == 2
    assert "weights or random" in capsys.readouterr().err
    assert main([*words, "--model.init=random", "--model.num_hidden_layers=1"]) == 0
