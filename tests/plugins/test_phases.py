"""What a kind of step does next, what may follow on that, and who says so."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from typing import get_args

import pytest

from lightning_offload.plugins.phases import Phase, Stage

PLUGINS = Path(__file__).parents[2] / "lightning_offload/plugins"
PHASES = [phase for phase in get_args(Phase) if phase != "idle"]
FORBIDDEN = {("recording", "measuring"), ("measuring", "measuring"), ("planned", "measuring")} | {
    ("unplanned", phase) for phase in ("verifying", "measuring")
}
"""A plan is measured once its replays were verified; where there is none, a recording comes first."""


@pytest.mark.parametrize(("before", "after"), list(itertools.product(PHASES, PHASES)))
def test_what_may_follow(before: Phase, after: Phase) -> None:
    """The rest raises, and leaves the phase as it is."""
    stage = Stage(before)
    if (before, after) in FORBIDDEN:
        with pytest.raises(AssertionError, match=f"that is {before} cannot come to be {after}"):
            stage.enter(after)
        assert stage.phase == before
    else:
        stage.enter(after)
        assert stage.phase == after


def _calls(path: Path, name: str) -> int:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return sum(isinstance(node, ast.Call) and ast.unparse(node.func).endswith(name) for node in nodes)


def test_one_file_changes_phases() -> None:
    """Entries begin in one; from then on it is up to the lifecycle."""
    assert [path.name for path in sorted(PLUGINS.glob("*.py")) if _calls(path, "stage.enter")] == ["lifecycle.py"]
    assert [path.name for path in sorted(PLUGINS.glob("*.py")) if _calls(path, "Stage")] == ["plan_entry.py"]
    with pytest.raises(AttributeError):
        Stage().phase = "planned"  # type: ignore[misc]


def _gives_up(node: ast.AST) -> bool:
    """Whether it sets an entry's program to nothing."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant) or node.value.value is not None:
        return False
    return any(isinstance(target, ast.Attribute) and target.attr == "program" for target in node.targets)


def test_plans_are_given_up_in_one_place() -> None:
    """With a reason, which the report counts."""
    found = {
        (path.name, function.name)
        for path in PLUGINS.glob("*.py")
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and any(map(_gives_up, ast.walk(function)))
    }
    assert found == {("plan_entry.py", "replan")}
