"""Break the code on purpose, one defect at a time, and see whether the test that should notice does.

    python tools/mutate.py                    # all of them: minutes
    python tools/mutate.py --only checkpoint  # those of one package
    python tools/mutate.py --out docs/mutations.md

A defect is put into a copy of src, and the named test runs with that copy. It is caught if the test fails there; the
same tests pass without it, which is seen first. Every named test is one of `make test`.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 600
"""For one test. One that hangs is ended sooner, by pytest-timeout, and has noticed."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A defect: a text that occurs once in a file below src/shoal, what stands there instead, and who notices."""

    what: str
    file: str
    old: str
    new: str
    test: str

    @property
    def package(self) -> str:
        return self.file.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one."""

    is_caught: bool
    by: str
    seconds: float


M = Mutation
MUTATIONS = [
    # ---- blueprint
    M(
        "messages between stages take no time",
        "blueprint/schedules/simulate.py",
        "seconds if source == rank else seconds + send",
        "seconds",
        "tests/unit/test_schedules.py::test_sending_takes_time_between_ranks_only",
    ),
    M(
        "the head counts for the first stage",
        "blueprint/partition.py",
        "work[-1] += last",
        "work[0] += last",
        "tests/unit/test_partition.py::test_equal_blocks",
    ),
    M(
        "fragments are exchanged one turn early",
        "blueprint/replicas/sync_words.py",
        "(step - (one + 1) * every // fragments)",
        "(step - one * every // fragments)",
        "tests/dist/test_replicas.py::test_fragments_take_turns_and_late_ones_keep_what_was_done_meanwhile",
    ),
    # ---- config
    M(
        "a duration is rounded down to steps",
        "config/duration.py",
        "math.ceil(samples / batch)",
        "math.floor(samples / batch)",
        "tests/unit/test_duration.py::test_work_is_rounded_up_to_steps_and_time_is_not_steps",
    ),
    M(
        "a run is resumed under any recipe",
        "config/resume_compat.py",
        "if found := changes(old, new):",
        "if found := changes(old, new)[:0]:",
        "tests/cli/test_resume.py::test_another_recipe_is_refused_with_the_difference",
    ),
    M(
        "a setting without effect is accepted",
        "config/checks/no_effect.py",
        "and not plan.sync and not plan.compress:",
        "and not plan.sync and plan.compress:",
        "tests/cli/test_bad_input.py::test_refused[exact first steps of all]",
    ),
    # ---- predict
    M(
        "parameters stay gathered under zero=3 instead of the others",
        "predict/exact/state_memory.py",
        "(plan.zero != 3 or is_pipeline)",
        "(plan.zero == 3 or is_pipeline)",
        "tests/unit/test_predictions.py::test_memory_of_the_zero_paper",
    ),
    M(
        "keys and values go round once too often",
        "predict/exact/traffic.py",
        "rounds = step.plan.layout.cp - 1",
        "rounds = step.plan.layout.cp",
        "tests/unit/test_predictions.py::test_keys_and_values_go_round",
    ),
    M(
        "FLOPs of the forward alone",
        "predict/workload.py",
        "if self.lora else 6 * self.active_parameters",
        "if self.lora else 2 * self.active_parameters",
        "tests/unit/test_workload.py::test_flops_of_a_token_are_six_per_parameter_and_attention",
    ),
    M(
        "the interval of a prediction has two upper ends",
        "predict/estimate/step_time.py",
        "low=total / factor",
        "low=total * factor",
        "tests/unit/test_step_time.py::test_an_interval_holds_its_centre_and_is_narrower_where_machines_were_measured",
    ),
    # ---- planner
    M(
        "the slower of two plans is kept",
        "planner/search.py",
        "return change < -SAME or",
        "return change > SAME or",
        "tests/unit/test_search.py::test_nothing_is_left_out_that_would_be_faster",
    ),
    M(
        "plans are ordered by memory where time is requested",
        "planner/search.py",
        'return (memory, time) if self.by == "memory" else (time, memory)',
        'return (time, memory) if self.by == "memory" else (memory, time)',
        "tests/unit/test_search.py::test_nothing_is_left_out_that_would_be_faster",
    ),
    # ---- comm
    M(
        "a mean over ranks is a sum",
        "comm/message_collectives.py",
        "            flat /= self.size",
        "            pass",
        "tests/dist/test_message_collectives.py::test_other_reductions_other_roots_and_lanes",
    ),
    M(
        "the backward of a tensor-parallel layer is not summed",
        "comm/differentiable_collectives.py",
        "return all_reduce(grads[0], ctx.group), None",
        "return grads[0], None",
        "tests/dist/test_compositions.py::test_a_composition_computes_what_one_process_does"
        "[4-ep=2 tp=2 sp=off zero=1 mb=2-bias]",
    ),
    M(
        "a bit stands for 0 and -2 instead of 1 and -1",
        "comm/compression/codecs.py",
        ".mul_(2).sub_(1)",
        ".mul_(2).sub_(2)",
        "tests/dist/test_compressed_reduce.py::test_one_bit_is_a_sign_and_a_scale_the_mean_size",
    ),
    # ---- launch
    M(
        "the echo of a failure is named before its cause",
        "launch/failure.py",
        "failure.at - HEAD_START * failure.is_sudden",
        "failure.at + HEAD_START * failure.is_sudden",
        "tests/dist/test_launch.py::test_which_failure_explains_the_others",
    ),
    # ---- numerics
    M(
        "gradients below the limit are made longer",
        "numerics/gradients.py",
        "(norm + 1e-6), max=1.0)",
        "(norm + 1e-6), max=2.0)",
        "tests/unit/test_numerics.py::test_clipping_equals_torch",
    ),
    M(
        "the second moment is corrected without a root",
        "numerics/optim/adamw_update.py",
        "correction2**0.5",
        "correction2",
        "tests/unit/test_adamw.py::test_it_computes_what_torch_does",
    ),
    M(
        "the learning rate rises where it should fall",
        "numerics/lr_schedule.py",
        "(1.0 + math.cos(",
        "(1.0 - math.cos(",
        "tests/unit/test_numerics.py::test_cosine_is_a_cosine",
    ),
    # ---- data
    M(
        "every rank loses the last sample of its share",
        "data/order.py",
        "batch * (coordinate + 1) // degree)",
        "batch * (coordinate + 1) // degree - 1)",
        "tests/unit/test_order.py::test_shares_partition_the_batch",
    ),
    M(
        "a resumed loader repeats samples",
        "data/loader.py",
        "self._position += self._share.batch",
        "self._position += 1",
        "tests/unit/test_loader.py::test_resume_equals_uninterrupted",
    ),
    M(
        "an evaluation goes beyond the end of the data",
        "data/loader.py",
        "share(min(batch, len(dataset) - start), coordinate, degree)",
        "share(batch, coordinate, degree)",
        "tests/unit/test_loader.py::test_evaluation_sees_every_sample_once",
    ),
    # ---- parallel
    M(
        "experts of a batch that counts for nothing are counted",
        "parallel/expert/aux_loss.py",
        "if factor != 0:",
        "if factor != -1:",
        "tests/unit/test_router.py::test_a_batch_that_counts_for_nothing_leaves_no_trace",
    ),
    M(
        "weights of two groups of a split backward are forgotten",
        "parallel/pipeline/split_backward.py",
        "other.leaves | group.leaves)",
        "other.leaves)",
        "tests/unit/test_split_backward.py::test_both_halves_are_the_whole",
    ),
    M(
        "running statistics are summed over ranks",
        "parallel/batch_norm.py",
        "_set(self._buffers, self._flat / self.every_step.size())",
        "_set(self._buffers, self._flat)",
        "tests/dist/test_batch_norm.py::test_they_are_the_mean_over_ranks_and_training_does_not_change",
    ),
    M(
        "squares of gradients are summed over replicas",
        "parallel/data/local_step_scale.py",
        "torch.stack([summed[1] / size,",
        "torch.stack([summed[1],",
        "tests/dist/test_replicas.py::test_how_far_gradients_lie_apart_is_measured",
    ),
    # ---- checkpoint
    M(
        "the bytes of a file are not synced",
        "checkpoint/storage/filesystem.py",
        "            os.fsync(file.fileno())\n",
        "",
        "tests/unit/test_power_loss.py::test_what_was_reported_survives_a_power_loss",
    ),
    M(
        "the names in a step are not synced before it gets its own",
        "checkpoint/storage/store.py",
        "            disk.sync(draft)\n",
        "",
        "tests/unit/test_power_loss.py::test_what_was_reported_survives_a_power_loss",
    ),
    M(
        "hashes are not compared",
        "checkpoint/storage/shard_file.py",
        "hashlib.sha256(chunk).hexdigest() != self.file.hashes[number]",
        "False",
        "tests/unit/test_checkpoint_files.py::test_one_bit_that_the_disk_turned_is_refused",
    ),
    # ---- train
    M(
        "the loss scale is never undone",
        "train/step/optimizer_step.py",
        "coefficient / self.loss_scale.scale)",
        "coefficient)",
        "tests/unit/test_run.py::test_the_loss_scale_changes_nothing_but_the_scale",
    ),
    M(
        "an update with a NaN is applied",
        "train/step/optimizer_step.py",
        "is_applied = self.keeps_nonfinite or math.isfinite(norm)",
        "is_applied = True",
        "tests/unit/test_run.py::test_nan_can_be_skipped",
    ),
    M(
        "an evaluation leaves frozen parts in training mode",
        "train/evaluate.py",
        "module.training = was_training",
        "module.training = True",
        "tests/unit/test_run.py::test_evaluation_leaves_frozen_parts_frozen",
    ),
    # ---- elastic
    M(
        "progress does not renew restarts",
        "elastic/restart.py",
        "self._used, self.newest = 0, saved",
        "self.newest = saved",
        "tests/cli/test_endings.py::test_a_run_that_makes_progress_has_all_its_restarts_again",
    ),
    M(
        "the state in memory of a run that failed is removed",
        "elastic/memory_tier.py",
        "            if is_done:\n",
        "            if True:\n",
        "tests/unit/test_recovery.py::test_the_state_of_a_run_that_failed_without_a_place_is_never_removed",
    ),
    # ---- verification
    M(
        "runs of unlike lengths are equal",
        "verification/compare.py",
        "if not steps or len(reference) != len(candidate):",
        "if not steps:",
        "tests/unit/test_compare.py::test_another_number_of_steps_is_a_difference",
    ),
    # ---- cli
    M(
        "a switch on the command line turns a setting off",
        "cli/overrides.py",
        'value if equals else "true"',
        'value if equals else "false"',
        "tests/cli/test_train.py::test_deterministic",
    ),
    M(
        "GiB are MiB",
        "config/parse_units.py",
        '"gib": 2.0**30, "tib"',
        '"gib": 2.0**20, "tib"',
        "tests/cli/test_plan.py::test_mistakes_get_one_message",
    ),
]


def find(mutation: Mutation, source: Path) -> tuple[Path, str]:
    """The file and its text, in which the old text occurs exactly once."""
    path = source / "shoal" / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1 or mutation.new == mutation.old:
        raise ValueError(f"{mutation.old!r} occurs {text.count(mutation.old)} times in {mutation.file}, and must once")
    return path, text


def pytest(tests: Sequence[str], source: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *more, *tests]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False)


def run(mutation: Mutation, source: Path) -> Outcome:
    """Put it into the copy, see what the test says, and take it out again."""
    path, text = find(mutation, source)
    path.write_text(text.replace(mutation.old, mutation.new))
    began = time.monotonic()
    try:
        ended = pytest([mutation.test], source, "-x")
    finally:
        path.write_text(text)
    seconds = time.monotonic() - began
    if ended.returncode not in (0, 1):
        raise RuntimeError(f"{mutation.what}: pytest ended with {ended.returncode}\n{ended.stdout[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    return Outcome(ended.returncode == 1, failed[1] if failed else mutation.test, seconds)


def table(outcomes: dict[Mutation, Outcome]) -> Iterator[str]:
    yield "| package | defect | file | outcome | test |"
    yield "|---|---|---|---|---|"
    for mutation, outcome in outcomes.items():
        verdict = "caught" if outcome.is_caught else "**survived**"
        by = outcome.by.replace("|", "\\|")
        yield f"| {mutation.package} | {mutation.what} | `{mutation.file}` | {verdict} | `{by}` |"


HEAD = """\
# Defects on purpose

Each row is a defect that was put into a copy of the code, and the test of `make test` that failed then. Without the
defect all of these tests pass. Made by `python tools/mutate.py --out docs/mutations.md`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="defects whose package, file or name has this word")
    parser.add_argument("--out", type=Path, help="a file for the table")
    arguments = parser.parse_args()
    chosen = [one for one in MUTATIONS if arguments.only in f"{one.file} {one.what}"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "src")
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        for mutation in chosen:
            find(mutation, source)
        whole = pytest(sorted({one.test for one in chosen}), source)
        if whole.returncode:
            print(f"without any defect:\n{whole.stdout[-5000:]}", file=sys.stderr)
            return 2
        outcomes: dict[Mutation, Outcome] = {}
        for mutation in chosen:
            outcomes[mutation] = outcome = run(mutation, source)
            verdict = "caught" if outcome.is_caught else "SURVIVED"
            print(f"{verdict:<9} {outcome.seconds:5.0f} s  {mutation.package}: {mutation.what}", flush=True)
    caught = sum(outcome.is_caught for outcome in outcomes.values())
    print(f"{caught} of {len(outcomes)} caught")
    if arguments.out:
        text = "\n".join([HEAD, f"{caught} of {len(outcomes)} are caught.", "", *table(outcomes)])
        arguments.out.write_text(f"{text}\n")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
