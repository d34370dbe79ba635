"""The three batch sizes of a config, of which two decide the third.

train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks
"""

from __future__ import annotations

from shoal.config.deepspeed.translation import Reader
from shoal.errors import Problem

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def translate_batch(reader: Reader, data_ranks: int | None) -> None:
    """The global batch and the size of a microbatch. `data_ranks` None: not known yet."""
    total, micro, steps = reader.whole(TOTAL), reader.whole(MICRO), reader.whole(STEPS)
    into = reader.into
    is_open = any(reader.values.get(key) == "auto" for key in (TOTAL, MICRO, STEPS))
    may_follow = not is_open or (steps is not None and data_ranks is not None)  # as the Trainer fills it in
    if problem := _contradiction(total, micro, steps, data_ranks):
        into.problems.append(problem)
        return
    if total is None and micro is None and not is_open and (into.target == "initialize" or steps is not None):
        beside = "" if steps is None else f" beside {STEPS} {steps}"
        fix = f'"{MICRO}": 4, with "{STEPS}": {steps or 1}'
        into.problems.append(Problem("E007", f"the config has neither {TOTAL} nor {MICRO}{beside}", fix))
        return
    if micro is None and total is not None and data_ranks is not None:
        _answered(reader, MICRO)
        micro = total // (data_ranks * (steps or 1))
        reader.plan(MICRO, "mb", micro, "follows from the others")
    elif micro is not None:
        reader.plan(MICRO, "mb", micro)
    if total is None and micro is not None and may_follow:
        total = _total(reader, micro, steps or 1, data_ranks)
        if total is not None:
            _answered(reader, TOTAL)
            reader.setting(TOTAL, "data.global_batch", total, f"for {data_ranks} data-parallel ranks")
    elif total is not None:
        reader.setting(TOTAL, "data.global_batch", total)
    if steps is not None and total is None and is_open:
        reader.same(STEPS, f"no effect here: {TOTAL} and {MICRO} are open; --data.global_batch and --plan.mb say it")
    elif steps is not None:
        reader.same(STEPS, f"follows from {TOTAL} and {MICRO}")
    if data_ranks is not None and micro and total:
        into.num_accumulated = total // (micro * data_ranks)


def _answered(reader: Reader, key: str) -> None:
    """An open key that follows from others is not left open."""
    reader.into.lines = [line for line in reader.into.lines if line.key != key]


def _total(reader: Reader, micro: int, steps: int, data_ranks: int | None) -> int | None:
    """The global batch that follows from the others; None: without the number of ranks there is none."""
    if data_ranks is not None:
        return micro * steps * data_ranks
    what = f"{TOTAL} is missing, and {MICRO} {micro} x {STEPS} {steps} is for each of an unknown number of ranks"
    fix = f'"{TOTAL}": {8 * micro * steps}, for 8 data-parallel ranks; or --nproc 8 and --plan with tp, pp and cp'
    reader.into.problems.append(Problem("E007", what, fix))
    return None


def _contradiction(total: int | None, micro: int | None, steps: int | None, ranks: int | None) -> Problem | None:
    """The problem of sizes that do not fit together, with the arithmetic."""
    if total is None:
        return None
    factors = [(MICRO, micro), (STEPS, steps), ("ranks", ranks)]
    known = [(name, value) for name, value in factors if value is not None]
    product = 1
    for _, value in known:
        product *= value
    is_exact = len(known) == len(factors)
    if total == product if is_exact else total % product == 0:
        return None
    shown = " x ".join(f"{name} {value}" for name, value in known)
    relation = "is not" if is_exact else "is no multiple of"
    near = product if is_exact else max(product, total // product * product)
    what = f"{TOTAL} {total} {relation} {shown} = {product}"
    return Problem("E006", what, f'"{TOTAL}": {near}; or remove it')
