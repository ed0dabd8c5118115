"""Two processes under torchrun: all checks of `torchrun_checks` pass on both ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.launching import torchrun
from tests.distributed.torchrun_checks import CHECKS

SCRIPT = Path(__file__).with_name("torchrun_checks.py")


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """One pair of processes for all checks; the first that fails ends the pair."""
    folder = tmp_path_factory.mktemp("torchrun")
    try:
        return folder, torchrun(SCRIPT, folder)
    except AssertionError as error:
        return folder, str(error)


def test_check(launched: tuple[Path, str], subtests: pytest.Subtests) -> None:
    """Each check passes on both ranks; what it checks is its docstring or its name."""
    for check in [check.__name__ for check in CHECKS]:
        with subtests.test(check=check):
            folder, output = launched
            for rank in (0, 1):
                path = folder / f"rank{rank}.json"
                done = json.loads(path.read_text()) if path.exists() else []
                assert check in done, f"rank {rank} did not get to the end of {check}:\n{output}"


def test_a_budget_that_one_rank_cannot_meet_ends_the_job(tmp_path: Path) -> None:
    """Though the other one may wait for half an hour."""
    with pytest.raises(AssertionError) as raised:
        torchrun(SCRIPT, tmp_path, "infeasible_budget_on_one_rank")
    assert "BudgetInfeasibleError" in str(raised.value)
    assert "did not end within" not in str(raised.value)
