"""How fast is shoal on one GPU, compared with the alternatives and with the limit of the GPU?

python benchmarks/h200/run.py TABLE ...   one or more of: speed turns large fp8 rowwise shapes long longest roofline
                                         curve images hf hf-parts all

Every row is a process of its own (`systems.py`, `curve.py`, `images.py`), one after the other on an otherwise idle GPU,
or by turns; a table is one run, because GPUs of one kind differ by a few per cent. Peers need
`pip install torchtitan==0.2.2 accelerate transformers liger-kernel==0.8.5`, rowwise needs torchao.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from report import heading, table, write
from roofline import kernels, summary
from systems import SHAPES

HERE = Path(__file__).parent
Row = dict[str, str]
PROTOCOL = (
    "Random tokens, AdamW with weights and states in float32, unless a row says otherwise, products in bfloat16,"
    " compiled, no clipping; a step is forward, backward, update and the forgetting of gradients, timed from one"
    " synchronisation to the next; the median of the steps after warm-up, *measured*. MFU counts"
    " attention as if every token saw all, over 989 TFLOP/s. Memory is the most that torch has allocated. Ratios are to"
    " torchtitan in bf16, also those of fp8."
)

OWN_PROTOCOLS = {
    "curve": "A Llama of 8 layers of 1,024 features, 16 x 1,024 tokens a step, a learning rate of 1e-4 (slow: 3e-5)"
    " after 50 steps of warm-up, gradients clipped to 1; fp32 and Transformers are eager, shoal's bf16 and fp8 are"
    " compiled; losses of the training batches, *measured*.",
    "lora": "Random tokens, a frozen base in bfloat16, LoRA of rank 16 in float32 on all linear layers of the blocks,"
    " AdamW; times and memory as in the table `hf`. Ratios are to PEFT with Liger.",
    "hf": "Random tokens, AdamW with weights and states in float32, products in bfloat16; a step is forward, backward,"
    " update and the forgetting of gradients, timed from one synchronisation to the next; the median of the steps after"
    " warm-up, *measured*. Memory is the most that torch has allocated. Ratios are to Liger of the same model.",
    "images": "A loop written by hand and shoal by turns of ten steps, medians over the turns, *measured*.",
}

STEPS = ("--steps", "20", "--warmup", "6")
"""Single steps differ by one or two per cent."""
PACKAGES = ("torchtitan", "accelerate", "transformers", "liger-kernel", "torchao", "flash-attn-4", "nvidia-cudnn-cu13")
LEFT_OUT: set[str] = set()
"""Peers that are not installed, or left out by `--without`."""


def json_of(script: str, *words: str, timeout: int = 400) -> dict[str, Any]:
    """The last line of JSON that a process prints, or its error."""
    command = [sys.executable, str(HERE / script), *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {timeout} s"}
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    print(script, *words, lines[-1][:300] if lines else ended.stderr.splitlines()[-3:], flush=True)
    if lines:
        report: dict[str, Any] = json.loads(lines[-1])
        return report
    problems = [line for line in ended.stderr.splitlines() if "Error" in line]
    return {"error": (problems or ["no output"])[-1][:120]}


def speed_row(report: dict[str, Any], base: dict[str, Any] | None) -> Row:
    if "error" in report:
        return {
            "tokens/s": report["error"],
            "of torchtitan": "",
            "MFU": "",
            "GiB": "",
            "of its memory": "",
            "first step": "",
        }
    has_base = base is not None and "error" not in base
    return {
        "tokens/s": f"{report['tokens_per_s']:,}",
        "of torchtitan": f"{report['tokens_per_s'] / base['tokens_per_s']:.3f}" if has_base and base else "",
        "MFU": f"{report['mfu']:.1%}",
        "GiB": f"{report['peak_gib']:.1f}",
        "of its memory": f"{report['peak_gib'] / base['peak_gib']:.3f}" if has_base and base else "",
        "first step": f"{report['first_step_s']:.0f} s",
    }


def compared(what: str, words: list[str], runs: dict[str, list[str]]) -> list[Row]:
    """One row for each of `runs`, name → arguments of systems.py; ratios are to torchtitan in bf16."""
    kept = {name: arguments for name, arguments in runs.items() if arguments[0] not in LEFT_OUT}
    found = {name: json_of("systems.py", *arguments, *words) for name, arguments in kept.items()}
    base = next((report for name, report in found.items() if name.startswith("torchtitan") and "fp8" not in name), None)
    return [{"model": what, "system": name, **speed_row(report, base)} for name, report in found.items()]


def speed() -> tuple[str, list[Row]]:
    words = ["--shape", "1.5b", "--micro-batch", "8", *STEPS]
    runs = {
        "shoal": ["shoal"],
        "torchtitan 0.2.2": ["torchtitan"],
        "shoal, gates kept": ["shoal", "--options", '{"recompute_swiglu": false}'],
        "shoal, fp8": ["shoal", "--precision", "fp8"],
        "torchtitan 0.2.2, fp8": ["torchtitan", "--precision", "fp8"],
        "Accelerate + Transformers": ["accelerate"],
        "Accelerate + Transformers, its own plugin": ["accelerate", "--plugin"],
    }
    return "1.50 B, 8 x 4096 tokens", compared("1.50 B", words, runs)


ROUNDS, TURN = 9, 5
"""Turns that each system has, and steps of a turn; the first turn, and the first step of each, do not count."""


def turns() -> tuple[str, list[Row]]:
    """Two systems at a time, both on the GPU: what it can do changes as it grows warm, and by turns for both alike."""
    ours: dict[str, list[str]] = {"shoal": [], "shoal, gates kept": ["--options", '{"recompute_swiglu": false}']}
    rows: list[Row] = []
    for name, options in ours.items():
        found = by_turns({name: ["shoal", *options], "torchtitan 0.2.2": ["torchtitan"]})
        base, own = found["torchtitan 0.2.2"], found[name]
        rows += [
            {
                "pair": " / ".join(found),
                "system": system,
                "step": f"{report['ms']:.1f} ms",
                "of turns": f"{report['least']:.1f} to {report['most']:.1f} ms",
                "GiB": f"{report['peak_gib']:.1f}",
                "speed": f"{base['ms'] / report['ms']:.3f}",
                "memory": f"{report['peak_gib'] / base['peak_gib']:.3f}",
            }
            for system, report in ((name, own), ("torchtitan 0.2.2", base))
        ]
    how = f"both on the GPU, with expandable segments, by turns of {TURN} steps, {ROUNDS - 1} of which count"
    return f"1.50 B, 8 x 4096 tokens; {how}", rows


def by_turns(systems: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    """Name → arguments of systems.py to the median step of each, and the least and largest median of a turn."""
    words = ["--shape", "1.5b", "--micro-batch", "8", "--turns"]
    command = [sys.executable, str(HERE / "systems.py")]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # both have to fit
    running = {
        name: subprocess.Popen(
            [*command, *arguments, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        for name, arguments in systems.items()
    }
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for _ in range(ROUNDS):
        for name, process in running.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{TURN}\n")
            process.stdin.flush()
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                sys.exit(f"{name} failed; run it for its error: python {' '.join(map(str, process.args))}")
            reports[name].append(json.loads(line))
    for process in running.values():
        process.communicate(timeout=60)
    found = {}
    for name, by_turn in reports.items():
        ms = [[1e3 * second for second in turn["seconds"][1:]] for turn in by_turn[1:]]
        medians = [statistics.median(turn) for turn in ms]
        found[name] = {
            "ms": statistics.median([one for turn in ms for one in turn]),
            "least": min(medians),
            "most": max(medians),
            "peak_gib": by_turn[-1]["peak_gib"],
        }
        print(name, [round(one, 1) for one in medians], flush=True)
    return found


def large() -> tuple[str, list[Row]]:
    words = ["--shape", "3.6b", "--micro-batch", "4", *STEPS]
    return "3.6 B, 4 x 4096 tokens", compared("3.6 B", words, {"shoal": ["shoal"], "torchtitan 0.2.2": ["torchtitan"]})


def fp8() -> tuple[str, list[Row]]:
    runs = {
        "shoal, fp8, bf16 weights and states": ["shoal", "--precision", "fp8", "--weights", "bf16"],
        "shoal, fp8, bf16 states": ["shoal", "--precision", "fp8"],
        "shoal, bf16, bf16 weights and states": ["shoal", "--weights", "bf16"],
        "torchtitan 0.2.2, bf16, bf16 weights and states": ["torchtitan"],
        "torchtitan 0.2.2, fp8, bf16 weights and states": ["torchtitan", "--precision", "fp8"],
    }
    words = ["--shape", "8b", "--micro-batch", "2", "--states", "bf16", "--steps", "10", "--warmup", "4"]
    return "fp8, 8.0 B, 2 x 4096 tokens", compared("8.0 B", words, runs)


def rowwise() -> tuple[str, list[Row]]:
    runs = {
        "tensorwise": ["shoal", "--precision", "fp8"],
        "tensorwise, head in bf16": ["shoal", "--precision", "fp8", "--options", '{"fp8_head": "none"}'],
        "rowwise": ["shoal", "--precision", "fp8", "--options", '{"fp8": "rowwise"}'],
    }
    return "kinds of fp8, 1.50 B, 8 x 4096 tokens", compared("1.50 B", ["--shape", "1.5b", "--micro-batch", "8"], runs)


OTHERS = [
    ("0.4b", "16", "2048"), ("1.1b", "8", "4096"), ("1.3b-256k", "8", "2048"), ("2.6b", "4", "4096"),
    ("1.5b", "32", "1024"), ("1.5b", "1", "32768"),
]  # fmt: skip
"""Shape, microbatch, sequence. Both systems of the largest do not fit on the GPU at once, so they take no turns."""


def shapes() -> tuple[str, list[Row]]:
    rows: list[Row] = []
    for shape, size, sequence in OTHERS:
        s = SHAPES[shape]
        heads = f"{s.heads} heads of {s.hidden // s.heads}, {s.kv_heads} for keys"
        what = (
            f"{s.parameters / 1e9:.2f} B: hidden {s.hidden}, {heads}, vocabulary {s.vocabulary:,}; {size} x {sequence}"
        )
        words = ["--shape", shape, "--micro-batch", size, "--sequence", sequence, *STEPS]
        rows += compared(what, words, {"shoal": ["shoal"], "torchtitan 0.2.2": ["torchtitan"]})
    return "other shapes", rows


def long() -> tuple[str, list[Row]]:
    words = ["--shape", "1.5b", "--steps", "5", "--warmup", "2"]
    runs = {
        "4k, nothing recomputed": ["shoal", "--micro-batch", "8", "--sequence", "4096"],
        "32k, nothing recomputed": ["shoal", "--micro-batch", "1", "--sequence", "32768"],
        "32k, selective": ["shoal", "--micro-batch", "1", "--sequence", "32768", "--recompute", "selective"],
        "32k, full": ["shoal", "--micro-batch", "1", "--sequence", "32768", "--recompute", "full"],
        "128k, full": ["shoal", "--micro-batch", "1", "--sequence", "131072", "--recompute", "full"],
    }
    return "1.50 B, long sequences", compared("1.50 B", words, runs)


LONGEST = (524288, 262144)
"""Tokens. A step of the first takes three minutes."""


def longest() -> tuple[str, list[Row]]:
    """The first that can be trained, and those that could not."""
    words = ["--shape", "1.5b", "--micro-batch", "1", "--recompute", "full", "--states-first"]
    words += ["--steps", "1", "--warmup", "0"]  # compiled in the same step
    rows: list[Row] = []
    for tokens in LONGEST:
        rows += compared("1.50 B", words, {f"{tokens:,} tokens, full": ["shoal", "--sequence", str(tokens)]})
        if rows[-1]["GiB"]:
            break
    return "1.50 B, the longest sequence, one step, compiling included", rows


def roofline() -> tuple[str, list[Row]]:
    """Time by kind of kernel against its floor."""
    shape, tokens = SHAPES["1.5b"], 8 * 4096
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        json_of("systems.py", "shoal", "--shape", "1.5b", "--micro-batch", "8", "--profile", str(trace))
        found = summary(kernels(trace), steps=3)
    products = 6 * (shape.parameters - shape.vocabulary * shape.hidden) * tokens
    attention = 12 * shape.layers * shape.hidden * 4096 * tokens / 2
    floors = {
        "matmul": (products / 785e12 * 1e3, f"{products / 1e12:.0f} TFLOP at 785 TFLOP/s"),
        "attention": (attention / 785e12 * 1e3, f"{attention / 1e12:.0f} TFLOP (causal) at 785 TFLOP/s"),
        "optimizer": (shape.parameters * 32 / 4.3e12 * 1e3, "28 bytes a parameter, and 4 for the norm, at 4.3 TB/s"),
        "softmax of the loss": (4 * tokens * shape.vocabulary / 4.3e12 * 1e3, "logits read and written once"),
    }
    rows = [
        {
            "kind": kind,
            "ms": f"{ms:.1f}",
            "of the step": f"{ms / found['step_ms']:.1%}",
            "floor, ms": f"{floors[kind][0]:.1f}" if kind in floors else "",
            "floor": floors[kind][1] if kind in floors else "",
        }
        for kind, ms in found["ms"].items()
    ]
    idle = (1 - found["busy"]) * found["step_ms"]
    rows.append(
        {"kind": "idle", "ms": f"{idle:.1f}", "of the step": f"{1 - found['busy']:.1%}", "floor, ms": "0", "floor": ""}
    )
    copies = f"copies to the host: {found['copies_to_host']:.0f} a step, {found['copies_before_update']:.0f} of them"
    copies += " between the forward and the end of the update"
    return f"where the time of a step goes, 1.50 B, {found['step_ms']:.1f} ms; {copies}", rows


EXACT, SLOW = ["--precision", "fp32", "--eager", "--steps", "200"], ["--lr", "3e-5"]
CURVES = {
    "fp32": EXACT,
    "fp32, by halves": [*EXACT, "--micro-batch", "8"],
    "bf16": [],
    "bf16, Transformers": ["--transformers", "--steps", "200"],
    "fp8": ["--precision", "fp8"],
    "slow: fp32": [*EXACT, *SLOW],
    "slow: bf16": [*SLOW, "--steps", "200"],
}
"""Name → words for curve.py. `by halves`: the same sums in another order; what that changes is rounding alone.
`slow`: with a smaller learning rate, at which runs part later."""
PAIRS = [
    ("bf16", "fp32"), ("bf16, Transformers", "fp32"), ("fp32, by halves", "fp32"), ("slow: bf16", "slow: fp32"),
    ("fp8", "bf16"),
]  # fmt: skip


def curve() -> tuple[str, list[Row], list[Row]]:
    """All at once: what they compute does not depend on how long it takes."""
    with ThreadPoolExecutor(len(CURVES)) as pool:
        reports = pool.map(lambda words: json_of("curve.py", *words), CURVES.values())
        curves = {name: report.get("losses", []) for name, report in zip(CURVES, reports, strict=True)}
    steps = [0, *range(9, max(map(len, curves.values())), 10)]
    rows = [
        {"step": str(step + 1), **{name: f"{x[step]:.4f}" if step < len(x) else "" for name, x in curves.items()}}
        for step in steps
    ]
    pairs = [{"curve": a, "beside": b, **apart(curves[a], curves[b])} for a, b in PAIRS if curves[a] and curves[b]]
    return "losses on the default corpus, the same seed", pairs, rows


def apart(some: Sequence[float], others: Sequence[float]) -> Row:
    """How far two curves are apart, as far as both go."""
    pairs = list(zip(some, others, strict=False))
    ratios = [one / other - 1 for one, other in pairs]
    sizes = [abs(ratio) for ratio in ratios]
    return {
        "steps": str(len(pairs)),
        "mean loss": f"{sum(one for one, _ in pairs) / sum(other for _, other in pairs) - 1:+.3%}",
        "single steps, mean": f"{statistics.fmean(sizes):.2%}",
        "single steps, most": f"{max(sizes):.2%}",
        "steps over 0.5 %": str(sum(size > 0.005 for size in sizes)),
        "last step": f"{ratios[-1]:+.2%}",
    }


def images() -> tuple[str, list[Row]]:
    report = json_of("images.py", "--rounds", "3")
    return "ResNet-50, bf16, channels-last, compiled, synthetic images", [
        {key: str(value) for key, value in report.items()}
    ]


HF_MODELS = {
    "llama": "Llama, 1.50 B",
    "qwen3": "Qwen3, 1.62 B",
    "gemma3": "Gemma 3, 1.55 B",
}


LIGER = "Transformers + Liger"


def hf() -> tuple[str, list[Row]]:
    """Models of transformers, unmodified, against kernels of Liger and a compiled model; and shoal's own Llama."""
    rows: list[Row] = []
    for family, what in HF_MODELS.items():
        runs = {
            LIGER: ("hf.py", "liger", "--family", family),
            "Transformers under shoal.Run": ("hf.py", "shoal", "--family", family),
        }
        if family == "llama":
            runs["Transformers, compiled"] = ("hf.py", "compiled")
            runs["shoal's own Llama"] = ("systems.py", "shoal", "--steps", "14", "--warmup", "5")
        rows += beside_liger(what, runs)
    return "models of transformers, 8 x 4096 tokens", rows


def hf_parts() -> tuple[str, list[Row]]:
    """What each part gives: without compilation, without swapped layers, without shoal."""
    runs = {
        LIGER: ("hf.py", "liger"),
        "under shoal.Run, not compiled": ("hf.py", "shoal", "--eager"),
        "under shoal.Run, fused_layers=False": ("hf.py", "shoal", "--options", '{"fused_layers": false}'),
        "Transformers alone, not compiled": ("hf.py", "plain"),
    }
    return "parts of a run of a model of transformers, 8 x 4096 tokens", beside_liger(HF_MODELS["llama"], runs)


def lora() -> tuple[str, list[Row]]:
    """LoRA of rank 16 on a frozen base of 8.0 B parameters, against PEFT."""
    runs = {"PEFT with Liger": ("lora.py", "peft-liger"), "PEFT": ("lora.py", "peft")}
    return "LoRA, 2 x 4096 tokens", beside_liger("Llama, 8.0 B", runs | {"shoal.lora": ("lora.py", "shoal")})


def beside_liger(what: str, runs: dict[str, tuple[str, ...]]) -> list[Row]:
    """One row for each of `runs`, name → script and its arguments; ratios are to the first, Liger."""
    reports = {name: json_of(*words) for name, words in runs.items()}
    base, rows = next(iter(reports.values())), []
    for name, report in reports.items():
        is_measured = "error" not in report and "error" not in base
        row = {"model": what, "system": name, "tokens/s": report.get("error") or f"{report['tokens_per_s']:,}"}
        row["of Liger"] = f"{report['tokens_per_s'] / base['tokens_per_s']:.3f}" if is_measured else ""
        row["GiB"] = f"{report['peak_gib']:.1f}" if "error" not in report else ""
        row["of its memory"] = f"{report['peak_gib'] / base['peak_gib']:.3f}" if is_measured else ""
        rows.append(row)
    return rows


TABLES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "speed": speed, "turns": turns, "large": large, "fp8": fp8, "rowwise": rowwise, "shapes": shapes, "long": long,
    "longest": longest, "roofline": roofline, "curve": curve, "images": images, "hf": hf,
    "hf-parts": hf_parts, "lora": lora,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="+", choices=[*TABLES, "all"])
    parser.add_argument("--without", default="", help="peers to leave out, with commas: accelerate,torchtitan")
    arguments = parser.parse_args()
    LEFT_OUT.update(arguments.without.split(","))
    for name in TABLES if "all" in arguments.tables else arguments.tables:
        title, *tables = TABLES[name]()
        top = heading(f"One GPU: {title}", OWN_PROTOCOLS.get(name.partition("-")[0], PROTOCOL), packages=PACKAGES)
        text = "\n".join([top, "\n\n".join(map(table, tables))])
        print(text)
        print("written to", write(f"h200-{name}", text), flush=True)


if __name__ == "__main__":
    main()
