"""Each ordering that protects memory on streams is needed: where one is missing, bits or a race report say so."""

from __future__ import annotations

import contextlib
import functools

import pytest

from tests.emulated_cuda.mutants import MUTANTS, RANDOM, SETTINGS, Mutant, Plain, Setting, notice, plain
from tests.emulated_cuda.workloads import RUNS
from tests.gpu.device import TOLERANT

pytest.importorskip("emulated_cuda", reason="needs the emulated device: make test-emulated")

pytestmark = TOLERANT

plain_of = functools.lru_cache(maxsize=4)(plain)


def check(name: str, setting: Setting) -> None:
    expected: Plain = plain_of(name)
    assert notice(name, expected, setting, contextlib.nullcontext()) == ""


@pytest.mark.parametrize("name", RUNS)
def test_workloads_are_free_of_races(name: str) -> None:
    """As they are, they leave plain training's bits, under a plan, and no race."""
    check(name, RANDOM)


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != RANDOM], ids=repr)
@pytest.mark.parametrize("name", RUNS)
def test_workloads_are_free_of_races_under_other_settings(name: str, setting: Setting) -> None:
    """Likewise under other schedules, plans of dice, and with the disk tier."""
    check(name, setting)


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutants_are_noticed(mutant: Mutant) -> None:
    """A workload that is all right as it is shows other bits or races where the ordering is missing."""
    for name, setting in mutant.noticed_by:
        assert notice(name, plain_of(name), setting, mutant.broken()), name
