"""What a kind of step does next, what may follow on that, and who says so."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from lightning_offload.plugins import lifecycle
from lightning_offload.plugins.plan_entry import Phase, PlanEntry

PLUGINS = Path(__file__).parents[2] / "lightning_offload/plugins"
PHASES = [phase for phase in get_args(Phase) if phase != "idle"]
FORBIDDEN = {("recording", "measuring"), ("measuring", "measuring"), ("planned", "measuring")} | {
    ("unplanned", phase) for phase in ("verifying", "measuring")
}
"""A plan is measured once its replays were verified; where there is none, a recording comes first."""


@pytest.mark.parametrize(("before", "after"), list(itertools.product(PHASES, PHASES)))
def test_what_may_follow(before: Phase, after: Phase) -> None:
    """The rest raises, and leaves the phase as it is."""
    kind = PlanEntry(phase=before)
    if (before, after) in FORBIDDEN:
        with pytest.raises(AssertionError, match=f"that is {before} cannot come to be {after}"):
            lifecycle._enter(kind, after)
        assert kind.phase == before
    else:
        lifecycle._enter(kind, after)
        assert kind.phase == after


def _changes_phase(function: ast.AST) -> bool:
    """Whether it says what an entry's next step does."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute) and node.attr == "phase"]
    return any(isinstance(node.ctx, ast.Store) and ast.unparse(node.value) != "self" for node in nodes)


def _functions_that(is_so: Callable[[ast.AST], bool]) -> set[tuple[str, str]]:
    return {
        (path.name, function.name)
        for path in PLUGINS.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and is_so(function)
    }


def test_one_file_changes_phases() -> None:
    """Entries begin in one; from then on it is up to the lifecycle."""
    assert _functions_that(_changes_phase) == {("lifecycle.py", "_enter")}


def _gives_up(node: ast.AST) -> bool:
    """Whether it sets an entry's program to nothing."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant) or node.value.value is not None:
        return False
    return any(isinstance(target, ast.Attribute) and target.attr == "program" for target in node.targets)


def test_plans_are_given_up_in_one_place() -> None:
    """With a reason, which the report counts."""
    assert _functions_that(lambda function: any(map(_gives_up, ast.walk(function)))) == {("plan_entry.py", "replan")}
