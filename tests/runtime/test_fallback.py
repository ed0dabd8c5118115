"""A step under the plan for another structure."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from lightning_offload.capture.live import LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.errors import PlanError
from lightning_offload.graph import Decision
from lightning_offload.graph.memory_plan import Action
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.fallback import SupersetRule
from lightning_offload.runtime.follow import Follower
from lightning_offload.runtime.hooks import executing, listen
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.program import Program, compile_plan
from lightning_offload.runtime.tiers import Tiers
from lightning_offload.runtime.values import Handle
from lightning_offload.tensors.op_facts import is_plain
from tests.capture.recording import observe
from tests.runtime.executing import CPU, plain, plan_of, saved_storages
from tests.runtime.inline import inline_lanes

SIDE = 64
LAYER_BYTES = 4 * SIDE * SIDE

Step = Callable[[], Tensor]


class Layers:
    """Layers that each save what they make, and some that differ."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.x = torch.randn(SIDE, SIDE, requires_grad=True)

    def __call__(self, layers: str) -> Step:
        """A step of some layers.

        "e" saves its result, "m" one that two ops save, "s" its argument, "r" noise that it then writes and nobody
        tells of; "w" is twice as wide.
        """

        def step() -> Tensor:
            y = self.x * 1
            for layer in layers:
                if layer == "e":
                    y = (y / 8).exp()
                elif layer == "m":
                    y = torch.relu(y)
                    y = y * y
                elif layer == "s":
                    y = (y + 1).sin()
                elif layer == "r":
                    y = torch.ops.aten.rrelu_with_noise(y, torch.empty_like(y), 0.1, 0.3, True)
                else:
                    y = torch.cat([y, y], 1).exp()[:, :SIDE] / 8
            return y.sum()

        return step


def _program(step: Step, action: Action, *, only: Callable[[int], bool] = lambda _: True) -> Program:
    recorder = Recorder(CPU)
    observe(lambda: step().backward(), recorder)  # type: ignore[no-untyped-call]
    graph = recorder.finish()
    chosen = [s for place, s in enumerate(saved_storages(graph)) if only(place)]
    return compile_plan(
        graph, plan_of(graph, *(Decision(storage=s, action=action) for s in chosen)), forms=recorder.saved_forms
    )


@contextlib.contextmanager
def _under(program: Program, *, sees_ops: bool = False) -> Iterator[tuple[StepExecutor, HostPool]]:
    pool = HostPool()
    executor = StepExecutor(
        program=program, device=CPU, tiers=Tiers(inline_lanes(), pool), verifier=None, sees_ops=sees_ops,
        observer=LiveBytes(CPU) if sees_ops else None,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.callback(listen())
        stack.enter_context(executing(executor))
        yield executor, pool


def _run(
    step: Step, program: Program, x: Tensor, *, sees_ops: bool = False
) -> tuple[SupersetRule, HostPool, list[bytes]]:
    x.grad = None  # of the recording
    expected = plain(step, x)[:1]
    torch.manual_seed(3)  # as plain training's
    with _under(program, sees_ops=sees_ops) as (executor, pool):
        step().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    found = [x.grad.numpy().tobytes()]
    x.grad = None
    assert found == expected
    assert executor.superset is not None
    return executor.superset, pool, found


def test_each_unpack_brings_back_what_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is released and fetched goes by the place of a pack in the plan, also where what is unpacked was kept."""
    layers, passed = Layers(), []
    bring_back = StepExecutor._bring_back

    def noting(executor: StepExecutor, follower: Follower, handle: Handle) -> None:
        passed.append(executor)
        bring_back(executor, follower, handle)

    monkeypatch.setattr(StepExecutor, "_bring_back", noting)
    _run(layers("esemes"), _program(layers("eseees"), "swap", only=lambda place: place % 2 == 0), layers.x)
    assert len(passed) == passed[0].num_unpacks > 5


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
def test_bits_are_those_of_plain_training(planned: str, seen: str, sees_ops: bool) -> None:
    """Whatever is missing or more, and nothing is left."""
    layers = Layers()
    _, pool, _ = _run(layers(seen), _program(layers(planned), "swap"), layers.x, sees_ops=sees_ops)
    gc.collect()
    pool.collect()
    assert pool.used_bytes == 0


def test_the_plan_holds_where_the_two_agree() -> None:
    """What it swaps leaves, what it keeps stays, in a step that lacks layers."""
    layers = Layers()
    program = _program(layers("eeeeeeee"), "swap", only=lambda place: place < 4)
    rule, pool, _ = _run(layers("eeeeee"), program, layers.x)
    assert pool.peak_bytes == 4 * LAYER_BYTES
    assert (rule.num_astray, rule.num_missing) == (0, 2)


def test_what_is_more_leaves_where_the_plan_kept_no_more() -> None:
    """Nothing of the plan's is given up for a few of them."""
    layers = Layers()
    program = _program(layers("eeee"), "keep")
    rule, pool, _ = _run(layers("eeeesss"), program, layers.x)
    assert rule.num_astray == 3
    assert rule.astray_bytes == pool.peak_bytes == 3 * LAYER_BYTES


def test_what_is_more_stays_where_something_is_missing() -> None:
    """There is room for as much as the plan has kept and the step has not."""
    layers = Layers()
    program = _program(layers("ewwwss"), "keep")
    rule, pool, _ = _run(layers("esssss"), program, layers.x)
    assert rule.num_missing
    assert pool.peak_bytes < 5 * LAYER_BYTES


def test_in_a_part_that_nobody_foresaw_all_that_was_kept_leaves() -> None:
    """Its memory is not known, and the plan's may be all that there is."""
    layers = Layers()
    program = _program(layers("eeee"), "keep")
    rule, pool, _ = _run(layers("eeee" + "s" * 12), program, layers.x)
    assert rule.num_astray == 12
    assert pool.peak_bytes >= 15 * LAYER_BYTES


def test_what_is_saved_twice_leaves_as_well() -> None:
    """Both handles on it let go, or its memory stays."""
    layers = Layers()
    program = _program(layers("mmmm"), "keep")
    layers.x.grad = None
    before = _storages()
    with _under(program) as (executor, _):
        loss = layers("mmmm" + "s" * 12)()
        kept = _storages() - before
        loss.backward()  # type: ignore[no-untyped-call]
    assert executor.superset is not None
    assert executor.superset.num_astray == 12
    assert len(kept) <= 2  # of twenty: what the last op has saved


def _storages() -> set[int]:
    """Those as large as what a layer saves, whoever's they are."""
    gc.collect()
    plain = (found for found in gc.get_objects() if type(found) is Tensor and is_plain(found))
    storages = (tensor.untyped_storage() for tensor in plain if not is_functorch_wrapped_tensor(tensor))
    return {storage._cdata for storage in storages if storage.nbytes() == LAYER_BYTES}


def test_fingerprints_tell_structures_and_sizes() -> None:
    """The same of the same step, whatever plan it follows as far."""
    layers = Layers()
    program = _program(layers("eses"), "swap")
    found = {seen: _run(layers(seen), program, layers.x)[0].fingerprint for seen in ("eses", "ess", "wsew", "esesw")}
    assert len(set(found.values())) == 4
    assert _run(layers("eses"), program, layers.x)[0].fingerprint == found["eses"]


def test_only_plans_that_need_no_op_to_be_seen_can_be_followed() -> None:
    """Others are refused when they are compiled."""
    layers = Layers()
    with pytest.raises(PlanError, match="needs no op"):
        _program(layers("ssss"), "recompute", only=lambda place: place > 0)


@pytest.mark.parametrize(("width", "leaves"), [(8, False), (1, True)])
def test_a_large_part_that_nobody_foresaw_is_told_by_its_bytes(width: int, leaves: bool) -> None:
    """Two tensors are enough where they take much of the budget."""
    layers = Layers()
    program = _program(layers("eeee"), "keep")
    plan = dataclasses.replace(program.plan, budget_bytes=program.plan.predicted_peak_bytes + width * LAYER_BYTES)
    rule, pool, _ = _run(layers("eeeess"), dataclasses.replace(program, plan=plan), layers.x)
    assert rule.num_astray == 2
    assert (pool.peak_bytes > 4 * LAYER_BYTES) == leaves
