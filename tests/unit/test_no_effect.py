"""Settings that `sync=auto` leaves without effect are reset to their defaults."""

from __future__ import annotations

from shoal.blueprint.plan import Plan
from shoal.config.checks.no_effect import no_effect, without_no_effect
from shoal.config.recipe import CommSection, Recipe


def test_the_recipe_of_a_chosen_plan_is_valid() -> None:
    comm = CommSection(outer_lr=0.5, fragments=2, warmup_steps=3, algorithm="ring")
    for words in ("", "compress=powersgd", "sync=diloco:50 compress=int8", "sync=local:1 compress=powersgd"):
        plan = Plan.parse(words).resolve(2)
        kept = without_no_effect(comm, plan)
        assert list(no_effect(Recipe(comm=kept), plan)) == []
        assert kept.algorithm == "ring"
        assert (kept.fragments, kept.outer_lr) == ((2, 0.5) if "diloco" in words else (1, 0.7))
        assert kept.warmup_steps == (3 if plan.compress or plan.sync else None)
    assert len(list(no_effect(Recipe(comm=comm), Plan().resolve(2)))) == 2
