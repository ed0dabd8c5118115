"""A step under the plan for another structure."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Sequence

import pytest

from lightning_offload.errors import PlanError
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.values import LiveValue
from tests.runtime.engines import Log
from tests.runtime.superset import LAYER_BYTES, SIDE, Layers, program_for, run, under


@pytest.fixture(params=["native", "python"])
def runs_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine to execute steps in; that they are recorded in is the same for both."""
    monkeypatch.delenv("LIGHTNING_OFFLOAD_ENGINE", raising=False)
    if request.param == "native":
        request.getfixturevalue("core")
    return str(request.param)


def test_each_unpack_brings_back_what_is_due(monkeypatch: pytest.MonkeyPatch, runs_in: str) -> None:
    """What is released and fetched goes by the place of a pack in the plan, also where what is unpacked was kept."""
    layers, passed = Layers(), list[int]()
    bring_back = StepExecutor._bring_back

    def noting(executor: StepExecutor, behind: Sequence[int], value: LiveValue | None) -> None:
        passed.extend(behind)
        bring_back(executor, behind, value)

    monkeypatch.setattr(StepExecutor, "_bring_back", noting)
    program = program_for(layers("eseees"), "swap", chance=random.Random(2))
    run(layers("esemes"), program, layers.x, runs_in)
    assert len(program.busy_unpacks) > 2
    assert [ordinal for ordinal in passed if ordinal in program.busy_unpacks] == sorted(program.busy_unpacks)


@pytest.mark.parametrize("sees_ops", [False, True])
@pytest.mark.parametrize(
    ("planned", "seen"),
    [
        ("eeeeee", "eee"),
        ("eee", "eeeeeeeee"),
        ("eses", "wwww"),
        ("ewewew", "eeewww"),
        ("e", ""),
        ("wsw", "wseeeeeeeesw"),
        ("ssssss", "srssrs"),
        ("eeee", "rrrr"),
    ],
)
def test_bits_are_those_of_plain_training(planned: str, seen: str, sees_ops: bool, runs_in: str) -> None:
    """Whatever is missing or more, and nothing is left."""
    layers = Layers()
    _, pool, _ = run(layers(seen), program_for(layers(planned), "swap"), layers.x, runs_in, sees_ops=sees_ops)
    gc.collect()
    pool.collect()
    assert pool.used_bytes == 0


@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("seed", range(30))
def test_both_engines_do_the_same_of_random_structures(seed: int) -> None:
    """Random plans, followed by steps of random other structures: the bits of plain training, and nothing is left."""
    chance, layers = random.Random(seed), Layers()
    program = program_for(
        layers(_some_layers(chance)), "swap", only=lambda _: chance.random() < 0.6, chance=chance,
        open_sizes=chance.choice([(), (2 * SIDE,), (2 * SIDE, 3 * SIDE)]),
    )  # fmt: skip
    persistent = [layers.given.untyped_storage()._cdata]
    room = chance.choice([None, 0, 2 * LAYER_BYTES])
    program = dataclasses.replace(program, plan=dataclasses.replace(program.plan, budget_bytes=room))
    for seen in (_some_layers(chance) for _ in range(3)):
        shown = []
        for engine in ("native", "python"):
            lanes = Log()
            rule, pool, _ = run(layers(seen), program, layers.x, engine, persistent=persistent, lanes=lanes)
            ledger = rule.ledger
            # What is read twice stays on the host in Python, and does not in the core.
            left = [num_bytes for direction, num_bytes in lanes.events if direction == "out"]
            moved = (pool.peak_bytes, left) if "b" not in seen else ()
            shown.append((rule.num_unmatched, rule.num_missing, ledger.astray_bytes, ledger.kept_bytes, moved))
            gc.collect()
            pool.collect()
            assert pool.used_bytes == ledger.alive_bytes == 0
        assert shown[0] == shown[1]


def _some_layers(chance: random.Random) -> str:
    return "".join(chance.choices("emsrwtdpgkbxu", k=chance.randrange(2, 24)))


def test_the_plan_holds_where_the_two_agree(runs_in: str) -> None:
    """What it swaps leaves, what it keeps stays, in a step that lacks layers."""
    layers = Layers()
    program = program_for(layers("eeeeeeee"), "swap", only=lambda place: place < 4)
    rule, pool, _ = run(layers("eeeeee"), program, layers.x, runs_in)
    assert pool.peak_bytes == 4 * LAYER_BYTES
    assert (rule.num_unmatched, rule.num_missing) == (0, 2)


def test_a_plan_without_saves_is_followed_as_well(runs_in: str) -> None:
    """The step is unmatched from the first save on, and leaves nothing."""
    layers = Layers()
    rule, pool, _ = run(layers("eee"), program_for(layers(""), "swap"), layers.x, runs_in)
    assert rule.num_unmatched == 3
    assert pool.peak_bytes == 3 * LAYER_BYTES


def test_what_is_more_leaves_where_the_plan_kept_no_more(runs_in: str) -> None:
    """Nothing of the plan's is given up for a few of them."""
    layers = Layers()
    program = program_for(layers("eeee"), "keep")
    rule, pool, _ = run(layers("eeeesss"), program, layers.x, runs_in)
    assert rule.num_unmatched == 3
    assert rule.ledger.astray_bytes == pool.peak_bytes == 3 * LAYER_BYTES


def test_what_is_more_stays_where_something_is_missing(runs_in: str) -> None:
    """There is room for as much as the plan has kept and the step has not."""
    layers = Layers()
    program = program_for(layers("ewwwss"), "keep")
    rule, pool, _ = run(layers("esssss"), program, layers.x, runs_in)
    assert rule.num_missing
    assert pool.peak_bytes < 5 * LAYER_BYTES


def test_in_a_part_that_nobody_foresaw_all_that_was_kept_leaves(runs_in: str) -> None:
    """Its memory is not known, and the plan's may be all that there is."""
    layers = Layers()
    program = program_for(layers("eeee"), "keep")
    rule, pool, _ = run(layers("eeee" + "s" * 12), program, layers.x, runs_in)
    assert rule.num_unmatched == 12
    assert pool.peak_bytes >= 15 * LAYER_BYTES


@pytest.mark.parametrize("layer", ["e", "m"])
def test_what_leaves_does_so_as_forward_goes(layer: str, runs_in: str) -> None:
    """Not at its end: what an op has saved has left by the save of a later one, also what two have saved."""
    layers = Layers()
    program = program_for(layers(6 * layer), "swap")
    with under(program, runs_in) as (executor, _):
        loss = layers(5 * layer)()
        kept = layers.num_alive()
        loss.backward()  # type: ignore[no-untyped-call]
    assert executor.superset is not None
    assert not executor.superset.num_unmatched
    assert kept <= 2


def test_what_is_saved_twice_leaves_as_well(runs_in: str) -> None:
    """Both handles on it let go, or its memory stays."""
    layers = Layers()
    program = program_for(layers("mmmm"), "keep")
    with under(program, runs_in) as (executor, _):
        loss = layers("mmmm" + "s" * 12)()
        kept = layers.num_alive()
        loss.backward()  # type: ignore[no-untyped-call]
    assert executor.superset is not None
    assert executor.superset.num_unmatched == 12
    assert kept <= 2  # what the last op has saved


def test_what_is_exposed_stays(runs_in: str) -> None:
    """What the plan swaps and the program may write unseen is kept, and later steps of the kind have their ops seen."""
    layers = Layers()
    with under(program_for(layers("s"), "swap"), runs_in) as (executor, pool):
        layers("x")().backward()  # type: ignore[no-untyped-call]
    assert executor.took_data
    assert pool.peak_bytes == 0


def test_fingerprints_tell_structures_and_sizes(runs_in: str) -> None:
    """The same of the same step, whatever plan it follows as far."""
    layers = Layers()
    program = program_for(layers("eses"), "swap")
    found = {
        seen: run(layers(seen), program, layers.x, runs_in)[0].ledger.fingerprint
        for seen in ("eses", "ess", "wsew", "esesw")
    }
    assert len(set(found.values())) == 4
    assert run(layers("eses"), program, layers.x, runs_in)[0].ledger.fingerprint == found["eses"]


def test_only_plans_that_need_no_op_to_be_seen_can_be_followed() -> None:
    """Others are refused when they are compiled."""
    layers = Layers()
    with pytest.raises(PlanError, match="needs no op"):
        program_for(layers("ssss"), "recompute", only=lambda place: place > 0)


@pytest.mark.parametrize(("width", "leaves"), [(8, False), (1, True)])
def test_a_large_part_that_nobody_foresaw_is_told_by_its_bytes(width: int, leaves: bool, runs_in: str) -> None:
    """Two tensors are enough where they take much of the budget."""
    layers = Layers()
    program = program_for(layers("eeee"), "keep")
    plan = dataclasses.replace(program.plan, budget_bytes=program.plan.predicted_peak_bytes + width * LAYER_BYTES)
    rule, pool, _ = run(layers("eeeess"), dataclasses.replace(program, plan=plan), layers.x, runs_in)
    assert rule.num_unmatched == 2
    assert (pool.peak_bytes > 4 * LAYER_BYTES) == leaves
