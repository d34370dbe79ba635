"""How much host memory does a rank need to start from the weights of a folder?

python benchmarks/pretrained/run.py
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import arguments, heading, table, write

import shoal
from shoal.checkpoint.formats.export import ExportSettings, export
from shoal.checkpoint.formats.huggingface import read
from shoal.checkpoint.storage.locate import find
from shoal.comm.world import World
from shoal.config.recipe import Recipe
from shoal.launch.local import launch
from shoal.train.build_model import build_for_layout
from shoal.train.recipe.saving.start_weights import expect_weights, start_with_weights
from shoal.train.run import Run

SIZES = {"intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000}
NAMES = {
    "part": "shoal: each rank reads its part",
    "loop": "`shoal.from_pretrained`, then `Run.prepare`",
    "whole": "`from_pretrained` of transformers on every rank, then `Run.prepare`",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024, help="features")
    parser.add_argument("--layers", type=int, default=16, help="blocks")
    parser.add_argument("--plan", default="zero=3", help="how two ranks hold the model")
    asked = arguments(parser, hidden=32, layers=2)
    assert transformers.LlamaForCausalLM  # loaded once, before ranks are forked
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        launch(make, (folder, asked.hidden, asked.layers), nproc=1)
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        rows = []
        for way, title in NAMES.items():
            ranks = launch(measure, (way, folder, asked.plan, Path(name, way)), nproc=2)
            rows.append(
                {
                    "way": title,
                    "peak above the base, by rank": ", ".join(f"{peak / 1e9:.2f} GB" for peak, _ in ranks),
                    "of the model": f"{max(peak for peak, _ in ranks) / size:.2f}",
                    "CPU seconds": f"{max(seconds for _, seconds in ranks):.1f}",
                }
            )
        same = exported_tensors(Path(name, "part"), Path(name, "out"), folder)
    question = (
        f"Measured host memory of each of two ranks (`{asked.plan}`) that start from a folder of {size / 1e9:.2f} GB."
        f" Of {same[1]} tensors in files, {same[0]} are the same bit for bit after an export."
    )
    text = heading("Pretrained weights", question, packages=["transformers"]) + "\n" + table(rows)
    print(text)
    print("written to", write("pretrained", text))
    assert same[0] == same[1]


def make(_placement: Any, _store: Any, folder: Path, hidden: int, layers: int) -> None:
    """Write a Llama with random weights."""
    config = transformers.LlamaConfig(hidden_size=hidden, num_hidden_layers=layers, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def measure(placement: Any, store: Any, way: str, folder: Path, plan: str, to: Path) -> tuple[int, float]:
    """Peak bytes above the base, and seconds of the CPU, to have a model and its weights laid out."""
    world = World.start(placement, device="cpu", store=store)
    with Run(plan, world=world) as run:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        base, began = memory("VmRSS"), time.process_time()
        if way == "part":
            load_part(run, folder)
        elif way == "loop":
            run.prepare(shoal.from_pretrained(str(folder)))
        else:
            run.prepare(transformers.LlamaForCausalLM.from_pretrained(folder))
        peak, seconds = memory("VmHWM") - base, time.process_time() - began
        if way == "part":
            run.save(to)
    return peak, seconds


def load_part(run: Run, folder: Path) -> None:
    """Start from a folder, as `shoal train --model.name hf:FOLDER` does."""
    recipe = Recipe.model_validate({"model": {"name": f"hf:{folder}"}})
    model = build_for_layout(recipe.model, recipe.run.seed)
    expect_weights(recipe, model)
    run.prepare(model)
    run.prepare(torch.optim.SGD(run.parameters, lr=0.1))
    start_with_weights(run, recipe)


def memory(kind: str) -> int:
    """Bytes of this process: resident now (VmRSS), or at most since the peak was forgotten (VmHWM)."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def exported_tensors(saved: Path, to: Path, folder: Path) -> tuple[int, int]:
    """The number of tensors that an export has bit for bit, and the number of all."""
    export(find(saved), to, ExportSettings(format="huggingface", model={"name": f"hf:{folder}"}), lambda _: None)
    before, after = read(folder), read(to)
    same = [
        before[name].dtype == after[name].dtype
        and all(torch.equal(a.read(), b.read()) for a, b in zip(before[name].boxes, after[name].boxes, strict=True))
        for name in before
        if name in after
    ]
    return sum(same), len(before.keys() | after.keys())


if __name__ == "__main__":
    main()
