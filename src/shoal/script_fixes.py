"""Translate the fix of an error from the command line to Python.

A fix is written once, for the command line. The command line prints it as it is. The text of the exception, which a
script shows, has the arguments of `Run`, `verify` and `plan` in their place.

    --launch.device cpu              device='cpu'
    --plan.mb 2 or 4                 mb=2 or 4
    --data.global_batch 8 or 12      batch_size=8 or 12
    shoal calibrate --quick          the same: it is a command
"""

from __future__ import annotations

import re

_CLAUSE = re.compile(r"(, or |; or |, and |; |, |: | or | with )")
_COMMAND = re.compile(r"(shoal|torchrun|srun|mpirun|pip|python|export|sbatch|rm|git)\b")
_FLAG = re.compile(r"--([a-z][a-z0-9_.-]*) ([^\s,;]+)")
_WORDS = {"true": "True", "false": "False", "null": "None"}
_FUSED_LOSS = {"auto": "None", "plain": "False", "fused": "True"}

CALLS = {
    "data.global_batch": "batch_size={}",
    "launch.nproc": "torchrun --nproc-per-node {}",
    "nproc": "torchrun --nproc-per-node {}",
    "optim.state_dtype": "shoal.AdamW(..., state_dtype={})",
    "comm.fragments": "outer=shoal.OuterOptimizer(fragments={})",
    "comm.outer_delay": "outer=shoal.OuterOptimizer(delay={})",
    "comm.outer_lr": "outer=shoal.OuterOptimizer(lr={})",
    "comm.outer_momentum": "outer=shoal.OuterOptimizer(momentum={})",
    "comm.rescale": "outer=shoal.OuterOptimizer(rescale={})",
    "checkpoint.dir": "run.save({})",
    "resume": "run.load(directory, step={})",
    "model.name": "shoal.from_pretrained({})",
    "run.start_from": "run.load({}, only_weights=True)",
}
"""Settings whose argument in a script has another name; else it is the last part of the setting's."""


def in_python(fix: str) -> str:
    """The fix as it is typed in a script.

    >>> in_python("--data.global_batch 8 or 12, or mb=2"), in_python("--launch.device cpu")
    ('batch_size=8 or 12, or mb=2', "device='cpu'")
    >>> in_python("shoal train --optim.lr 1"), in_python("--run.loss auto")
    ('shoal train --optim.lr 1', 'fused_loss=None')
    """
    if "--" not in fix:
        return fix
    return "".join(part if _COMMAND.match(part) else _FLAG.sub(_argument, part) for part in _CLAUSE.split(fix))


def _argument(flag: re.Match[str]) -> str:
    name, value = flag[1].replace("-", "_"), flag[2]
    if name == "run.loss":
        return f"fused_loss={_FUSED_LOSS.get(value, value)}"
    if name.startswith("plan."):  # a word of the plan, which has no quotes
        return f"{name.removeprefix('plan.')}={value}"
    return CALLS.get(name, name.rpartition(".")[2] + "={}").format(_literal(value))


def _literal(value: str) -> str:
    """A value in Python: words have quotes. Names in capitals stand for a value of the reader."""
    if value in _WORDS:
        return _WORDS[value]
    is_word = re.fullmatch(r"[a-zA-Z_./~][\w./~:-]*", value) and not value.isupper()
    return repr(value) if is_word and value != "None" else value
