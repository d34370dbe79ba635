"""A fuzzer of `shoal verify`: random models, sizes and plans on 1 to 8 ranks.

    python tests/fuzz_verify.py --seed 0 --cases 40

Every case has to be *verified* (equal to one device, and every predicted byte and call counted) or *rejected* (exit
code 2, each problem with a fix). Anything else is a finding, printed with the command that reproduces it. Case number n
of a seed is always the same one. Commands run in forks of one process that has torch loaded, from the root of the
repository.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import lcm, prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = "tests/documents.jsonl"
"""Rows of a few words: several of them are in one sample."""

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped", "zb", "zbv", "dualpipev")
COMPRESSIONS = ("fp16", "bf16", "int8", "1bit", "topk:0.1", "randomk:0.2", "powersgd:2")
SYNCS = ("local:2", "local:3", "diloco:2", "diloco:4")
SPLIT_BACKWARD = ("zb", "zbv", "dualpipev")
ODD = 0.25
"""How often one number of a case is changed, which mostly makes it illegal."""

Words = dict[str, Any]


# ---- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One command."""

    number: int
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        return shlex.join(["shoal", "verify", *self.words])


def case_of(seed: int, number: int) -> Case:
    """A pure function: which case it is does not depend on those before it."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(("llama", "moe", "mlp", "resnet"), (9, 9, 3, 1))[0]
    plan = _plan(rng, kind)
    settings = {"llama": _llama, "moe": _moe, "mlp": _mlp, "resnet": _resnet}[kind](rng, plan)
    world = prod(plan.get(axis, 1) for axis in AXES)
    if rng.random() < ODD:
        _make_odd(rng, plan, settings)
    clip = rng.choice((None, None, "0.01", "0.5", "null"))
    words = ["--nproc", str(world), "--device", "cpu", "--plan", _spelled(plan), "--steps", str(rng.choice((1, 2)))]
    words += ["--optim.clip", clip] if clip else []
    words += ["--run.seed", str(rng.randrange(100))]
    words += ["--real"] if settings.pop("real", kind in ("mlp", "resnet")) else []
    for key, value in settings.items():
        words += [f"--{key}", str(value).lower() if isinstance(value, bool) else str(value)]
    return Case(number, tuple(words))


def _plan(rng: random.Random, kind: str) -> Words:
    """A plan that is legal for a model that fits to it."""
    world = rng.choices((1, 2, 3, 4, 6, 8), (1, 5, 2, 6, 3, 4))[0]
    axes = {"mlp": ("dp_replicate", "dp_shard", "tp", "pp"), "resnet": ("dp_replicate", "dp_shard", "pp")}.get(
        kind, AXES
    )
    plan: Words = dict.fromkeys(axes, 1)
    rest = world
    while rest > 1:
        factor = next(number for number in (2, 3, 5, 7) if rest % number == 0)
        plan[rng.choice(axes)] *= factor
        rest //= factor
    shared = plan["dp_shard"] * plan.get("cp", 1)
    plan = {axis: degree for axis, degree in plan.items() if degree > 1}
    if "dp_shard" in plan or (shared > 1 and rng.random() < 0.5):
        plan["zero"] = rng.choice((1, 2, 3))
    if kind == "moe" and shared > 1 and plan.get("zero") and rng.random() < 0.7:
        plan["ep"] = rng.choice([number for number in range(2, shared + 1) if shared % number == 0])
    if "cp" in plan:
        plan["context"] = rng.choice(("ring", "ulysses"))
    if "tp" in plan and rng.random() < 0.7:
        plan["sp"] = rng.choice(("on", "off"))
    if "pp" in plan:
        _choose_schedule(rng, plan)
    if rng.random() < 0.4 and plan.get("schedule") not in SPLIT_BACKWARD:
        plan["recompute"] = "full" if "ep" in plan else rng.choice(("selective", "full"))
    if plan.get("dp_replicate", 1) > 1 and not plan.get("zero") and rng.random() < 0.3:
        plan |= rng.choice(({"compress": rng.choice(COMPRESSIONS)}, {"sync": rng.choice(SYNCS)}))
    if rng.random() < 0.7 or "pp" in plan:
        plan["mb"] = rng.choice((1, 1, 2, 3))
    return plan | ({"precision": rng.choice(("fp64", "bf16"))} if rng.random() < 0.3 else {})


def _choose_schedule(rng: random.Random, plan: Words) -> None:
    plan["schedule"] = rng.choice(SCHEDULES)
    if plan["schedule"] in ("interleaved", "looped", "zb") and rng.random() < 0.5:
        plan["v"] = rng.choice((2, 3))


def _num_stages(plan: Words) -> int:
    two = ("interleaved", "looped", "zbv", "dualpipev")
    return int(plan.get("pp", 1) * plan.get("v", 2 if plan.get("schedule") in two else 1))


def _batch(rng: random.Random, plan: Words) -> int:
    """Microbatches that any schedule can have, on every data rank."""
    pp = plan.get("pp", 1)
    least = 2 * pp if plan.get("schedule") == "dualpipev" else pp
    num_microbatches = least * rng.choice((1, 2)) if pp > 1 else rng.choice((1, 2, 3))
    return int(
        plan.get("mb", rng.choice((1, 2))) * num_microbatches * plan.get("dp_replicate", 1) * plan.get("dp_shard", 1)
    )


def _llama(rng: random.Random, plan: Words) -> Words:
    tp, cp = plan.get("tp", 1), plan.get("cp", 1)
    chunks = cp * (2 if plan.get("context") == "ring" else 1)
    kv_heads = tp * rng.choice((1, 1, 2, 3)) * (cp if plan.get("context") == "ulysses" and rng.random() < 0.5 else 1)
    heads = lcm(kv_heads * rng.choice((1, 2, 3)), tp * (cp if plan.get("context") == "ulysses" else 1))
    documents = rng.random() < 0.35
    settings: Words = {
        "real": rng.random() < 0.75,
        "model.num_layers": _num_stages(plan) + rng.choice((0, 1, 1, 2, 3)),
        "model.num_heads": heads,
        "model.num_kv_heads": kv_heads,
        "model.tied": rng.random() < 0.4,
        "data.global_batch": _batch(rng, plan),
        "data.mask_documents": documents,
    }
    if not settings["real"]:  # a small copy has its own sizes, but those of the whole have to fit to each other
        return settings | {"model.head_dim": 4}
    head_dim = rng.choice((2, 4, 6))
    vocabulary = rng.choice((257, 259, 264, 300)) if documents else rng.choice((31, 64, 97))
    settings |= {
        "model.head_dim": head_dim,
        "model.hidden": rng.choice((head_dim * heads, 8 * tp, 12 * tp, 15)),
        "model.ffn": tp * rng.choice((5, 8, 12)),
        "model.init_std": 0.1,
        "model.vocabulary": -(-vocabulary // tp) * tp if rng.random() < 0.7 else vocabulary,
        "data.seq_len": lcm(chunks, tp * chunks if plan.get("sp") != "off" else 1) * rng.choice((1, 2, 3)) + 0,
        "data.source": DOCUMENTS if documents else "synthetic",
    }
    if not documents:
        settings["data.vocabulary"] = vocabulary
    return settings


def _moe(rng: random.Random, plan: Words) -> Words:
    settings = _llama(rng, plan)
    ep = plan.get("ep", 1)
    num_experts = ep * rng.choice((1, 2, 3)) + (0 if ep > 1 else 1)
    settings = {"real": settings.pop("real"), "model.name": "moe", **settings}
    settings |= {
        "model.num_experts": num_experts,
        "model.top_k": min(num_experts, rng.choice((1, 2, 3))),
        "model.num_dense_layers": rng.choice((0, 0, 1)) if settings["model.num_layers"] > 1 else 0,
        "model.num_shared_experts": rng.choice((0, 0, 1, 2)),
        "model.score": rng.choice(("softmax", "sigmoid")),
        "model.normalise": rng.random() < 0.7,
        "model.z_coefficient": rng.choice((0.0, 0.01)),
        "model.bias_rate": rng.choice((0.0, 0.0, 0.01)),
        "model.qk_norm": rng.random() < 0.3,
    }
    if settings["real"]:
        settings["model.expert_ffn"] = plan.get("tp", 1) * rng.choice((3, 4, 6))
    if settings["model.top_k"] == 1:
        settings["model.normalise"] = False
    if rng.random() < 0.2:
        settings |= {"model.choice": "expert", "model.bias_rate": 0.0}
    elif rng.random() < 0.2:
        settings["model.capacity_factor"] = rng.choice((1.0, 1.25))
    return settings


def _mlp(rng: random.Random, plan: Words) -> Words:
    tp = plan.get("tp", 1)
    num_layers = max(2, _num_stages(plan) + rng.choice((0, 1, 2)))
    hidden = [tp * rng.choice((4, 5, 7)) for _ in range(num_layers - 1)]
    sizes = [48, *hidden, tp * rng.choice((3, 5))]
    return {
        "model.name": "mlp",
        "model.sizes": f"[{', '.join(map(str, sizes))}]",
        "model.activation": rng.choice(("relu", "gelu", "silu", "tanh")),
        **_images(rng, plan, 4, sizes[-1]),
    }


def _resnet(rng: random.Random, plan: Words) -> Words:
    plan["mb"] = rng.choice((2, 3))  # batch norm cannot take one image that small
    return {"model.name": "resnet", "model.width": rng.choice((2, 4)), **_images(rng, plan, 8, 10)}


def _images(rng: random.Random, plan: Words, size: int, classes: int) -> Words:
    return {
        "data.source": "synthetic",
        "data.synthetic_kind": "images",
        "data.image_size": size,
        "data.vocabulary": classes,
        "data.global_batch": _batch(rng, plan),
    }


def _make_odd(rng: random.Random, plan: Words, settings: Words) -> None:
    """Change one number, as a person would who did not think of the others."""
    numbers = [key for key, value in settings.items() if type(value) is int]
    degrees = [key for key in ("mb", "v", "ep", *AXES) if key in plan]
    if degrees and rng.random() < 0.4:
        key = rng.choice(degrees)
        plan[key] += rng.choice((1, 2))
    else:
        key = rng.choice(numbers)
        settings[key] = max(1, settings[key] + rng.choice((-1, 1, 2, 3)))


def _spelled(plan: Words) -> str:
    bare = ("schedule", "context", "precision")
    return " ".join(str(value) if key in bare else f"{key}={value}" for key, value in plan.items()) or "auto"


# ---- what came of one -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What a command left behind. code None: it did not end in time."""

    code: int | None
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Judged:
    """verified, rejected or finding; and why."""

    verdict: str
    why: str


def judge(outcome: Outcome) -> Judged:
    """Decide what an outcome is. Whatever is neither verified nor rejected with a fix is a finding."""
    if outcome.code is None:
        return Judged("finding", f"it did not end within {outcome.seconds:.0f} s")
    if "Traceback (most recent call last)" in outcome.err + outcome.out:
        return Judged("finding", f"a traceback, exit code {outcome.code}")
    try:
        told = json.loads(outcome.out)
    except ValueError:
        return Judged("finding", f"exit code {outcome.code} without one JSON object on stdout")
    if outcome.code == 2:
        return _rejected(told)
    if outcome.code != 0 or not told.get("equal"):
        first = told.get("first_difference") or told.get("error") or "equal is false"
        return Judged("finding", f"exit code {outcome.code}: {json.dumps(first)}")
    wrong = list(_miscounted(told))
    return Judged("finding", "; ".join(wrong)) if wrong else Judged("verified", _worst(told))


def _rejected(told: Mapping[str, Any]) -> Judged:
    problems = told.get("error", {}).get("problems", [])
    if not problems or not all(one.get("what") and one.get("fix") for one in problems):
        return Judged("finding", f"rejected without a fix: {json.dumps(problems)}")
    return Judged("rejected", problems[0]["what"])


def _miscounted(told: Mapping[str, Any]) -> list[str]:
    """Where a prediction is not what was counted."""
    counts = {f"{axis} bytes": count for axis, count in told["bytes"].items()}
    for axis, calls in told["collectives"].items():
        counts |= {f"{axis} {name} calls": count for name, count in calls.items()}
    near = {f"memory of {cause}": count for cause, count in told["memory"].items()}
    return [
        f"{name}: predicted {count['predicted']}, counted {count['counted']}"
        for name, count in (counts | near).items()
        if count.get("predicted") is not None
        and count.get("counted") is not None
        and abs(count["predicted"] - count["counted"]) > (0.01 * count["predicted"] if name in near else 0)
    ]


def _worst(told: Mapping[str, Any]) -> str:
    return f"{told['plan']}: {max(float(value) for key, value in told['worst'].items() if key != 'tensor'):.0e}"


# ---- running --------------------------------------------------------------------------------------------------------


def run(words: Sequence[str], timeout: float) -> Outcome:
    """One command in a fork, in a session of its own that ends with it."""
    began = time.monotonic()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            _be_the_command(words, out.fileno(), err.fileno())
        code = _wait(child, began + timeout)
        seconds = time.monotonic() - began
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Outcome(code, texts[0], texts[1], seconds)


def _be_the_command(words: Sequence[str], out: int, err: int) -> None:
    code = 70
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        from shoal.cli import main as shoal

        code = shoal(["verify", *words, "--json"])
        sys.stdout.flush()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int, deadline: float) -> int | None:
    """The exit code; None when its time was up, and it and what it has started were killed."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in _in_session(child):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.01)


def _in_session(session: int) -> list[int]:
    """Live processes of a session: workers lead process groups of their own in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found


def fuzz(cases: Sequence[Case], more: Sequence[str], timeout: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all of them; what came of each, and of how many."""
    began = time.monotonic()
    rows = []
    for case in cases:
        outcome = run([*case.words, *more], timeout)
        judged = judge(outcome)
        command = shlex.join([*shlex.split(case.command), *more])
        rows.append({"number": case.number, **asdict(judged), "seconds": outcome.seconds, "command": command})
        say(f"{len(rows)}/{len(cases)}  {judged.verdict:<8}  {outcome.seconds:5.1f} s  {judged.why[:300]}")
        if judged.verdict == "finding":
            say(f"    {command}")
            say("".join(f"    | {line}\n" for line in outcome.err.strip().splitlines()[-12:]).rstrip())
    counts = Counter(row["verdict"] for row in rows)
    return {
        **{verdict: counts.get(verdict, 0) for verdict in ("verified", "rejected", "finding")},
        "seconds": time.monotonic() - began,
        "cases": rows,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every case was verified or rejected with a fix; 1: there are findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=40, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one case may take")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, progress on stderr")
    parser.add_argument("--show", action="store_true", help="print the commands, and run nothing")
    parser.add_argument("more", nargs="*", help="after --: words for every command, such as --tolerance 0")
    options = parser.parse_args(arguments)
    cases = [case_of(options.seed, options.first + number) for number in range(options.cases)]
    if options.show:
        print("\n".join(case.command for case in cases))
        return 0
    os.chdir(ROOT)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Loaded, and nothing computed: a fork of this process can compute. Dynamo is what the first optimizer would load.
    import torch._dynamo  # noqa: F401

    import shoal.verification.api  # noqa: F401

    out = sys.stderr if options.json else sys.stdout
    told = fuzz(cases, options.more, options.timeout, lambda text: print(text, file=out, flush=True))
    summary = ", ".join(f"{told[verdict]} {verdict}" for verdict in ("verified", "rejected", "finding"))
    print(f"seed {options.seed}: {summary} in {told['seconds']:.0f} s", file=out)
    if options.json:
        print(json.dumps({"seed": options.seed, **told}))
    return 1 if told["finding"] else 0


if __name__ == "__main__":
    sys.exit(main())
