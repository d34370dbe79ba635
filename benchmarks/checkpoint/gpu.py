"""What does saving cost a run on a GPU that continues to train?

python benchmarks/checkpoint/gpu.py [--shape 1.5b] [--micro-batch 8] [--dir FOLDER] [--eager]

A llama with AdamW in float32 is trained on random tokens. After some steps it is saved without waiting, and training
continues. `held` is how long `run.save(..., wait=False)` takes, from a moment when the GPU is idle; the memory for the
copy is allocated during the steps before. Steps are timed from one synchronisation to the next.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "h200"))
from report import arguments, heading, table, write
from systems import SHAPES, drawn

from shoal.checkpoint.async_saver import AsyncSaver
from shoal.checkpoint.storage.store import Store
from shoal.config.recipe import OptimSection
from shoal.models.llama import Llama, LlamaConfig
from shoal.numerics.init import initialise
from shoal.numerics.optim.build import build_optimizer
from shoal.train.run import Run
from shoal.train.run_checkpoint import holder_of, state_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=12, help="before the save, and after it")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    asked = arguments(
        parser, shape="tiny", micro_batch=1, sequence=16, steps=1, eager=True, device="cpu", precision="fp32"
    )
    folder = Path(tempfile.mkdtemp(dir=asked.dir))
    try:
        print(measured(asked, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measured(arguments: argparse.Namespace, folder: Path) -> str:
    shape = SHAPES[arguments.shape]
    config = LlamaConfig(
        hidden=shape.hidden, num_layers=shape.layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        ffn=shape.ffn, vocabulary=shape.vocabulary, max_sequence=arguments.sequence,
    )  # fmt: skip
    with Run(
        f"mb={arguments.micro_batch} {arguments.precision}", compile=not arguments.eager, device=arguments.device
    ) as run:
        with torch.device(run.device):
            model = Llama(config)
        run.prepare(drawn(model) if run.device.type == "cuda" else initialised(model))
        run.prepare(build_optimizer(run.parameters, OptimSection(), lr=1e-4))
        saver = AsyncSaver(Store(folder), run.world.with_own_connections())

        def step() -> float:
            tokens = torch.randint(0, shape.vocabulary, (arguments.micro_batch, arguments.sequence + 1))
            both = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
            synchronise(run)
            began = time.perf_counter()
            run.step(both)
            synchronise(run)
            return time.perf_counter() - began

        first = [step() for _ in range(2)]
        saver.make_room(holder_of(run))  # beside the next steps
        beside_room = [step() for _ in range(6)]
        saver.finish()
        before = [step() for _ in range(arguments.steps)]
        run.check_last_step()
        began = time.perf_counter()
        held = saver.begin(holder_of(run), step=run.steps_done, state=state_of(run))
        during: list[float] = []
        while saver.is_busy and len(during) < 400:
            during.append(step())
        saver.finish()
        durable = time.perf_counter() - began
        after = [step() for _ in range(arguments.steps)]
        (news,) = saver.take_results()
        assert not news.failure, news.failure
    usual = statistics.median([*before, *after])
    gib = news.num_bytes / 2**30
    rows = [
        {"what": "state that was saved", "measured": f"{gib:.1f} GiB"},
        {"what": "the step was held", "measured": f"{held:.2f} s ({gib * 2**30 / held / 1e9:.1f} GB/s)"},
        {"what": "until it was on the disk", "measured": f"{durable:.1f} s ({gib * 2**30 / durable / 1e9:.2f} GB/s)"},
        {"what": "a step, before and after", "measured": f"{usual * 1e3:.1f} ms (median of {2 * len(before)})"},
        {
            "what": "a step, while it was written",
            "measured": f"{statistics.median(during) * 1e3:.1f} ms (median of {len(during)}):"
            f" {statistics.median(during) / usual:.3f} x",
        },
        {
            "what": "the slowest of those",
            "measured": f"{max(during) * 1e3:.1f} ms; before and after {max(*before, *after) * 1e3:.1f} ms",
        },
        {
            "what": "steps while memory for the copy was taken",
            "measured": f"{statistics.median(beside_room) * 1e3:.1f} ms, the slowest {max(beside_room) * 1e3:.1f} ms",
        },
        {"what": "the first two steps", "measured": ", ".join(f"{one:.1f} s" for one in first)},
    ]
    question = (
        f"A llama of {shape.parameters / 1e9:.2f} B, {arguments.micro_batch} x {arguments.sequence} tokens a step,"
        f" AdamW, weights and states in float32, {'eager' if arguments.eager else 'compiled'}. Bars: held at most 1 s,"
        " other steps slower by at most 3 %."
    )
    text = heading("A save beside training, on one GPU", question) + "\n" + table(rows)
    write("checkpoint-gpu", text)
    return text


def initialised(model: torch.nn.Module) -> torch.nn.Module:
    initialise(model, 0)
    return model


def synchronise(run: Run) -> None:
    if run.device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
