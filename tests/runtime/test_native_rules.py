"""Each rule of planned steps, held by both engines; a native core that breaks one fails here."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_offload.errors import StaleInputError
from lightning_offload.graph.memory_plan import Action, Decision
from lightning_offload.planning.problem import Problem
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.follow import ByOrdinal
from lightning_offload.runtime.native_executor import core_for
from lightning_offload.runtime.program import compile_plan
from tests.capture.recording import record
from tests.fuzz.running import decide
from tests.runtime.engines import CASES, LateLanes, Log, plainly, ran, shown, under, weights
from tests.runtime.executing import CPU, compiled, gradients, plan_of, saved_storages
from tests.runtime.inline import inline_lanes

pytestmark = pytest.mark.usefixtures("core")


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_engines_hold_the_same_when_forward_ends(case: str, action: Action) -> None:
    """What has left the device by then has left it in both."""
    step, _ = CASES[case]()
    program = compiled(step, action)
    found = []
    for engine in ("native", "python"):
        torch.manual_seed(3)
        with under(program, engine, inline_lanes()) as executor:
            loss = step()
            values = executor._table.all_indexed()
            found.append({value.index: value.live() is not None for value in values if value.has_handle})
            del values, loss
    assert found[0] == found[1]


def _unknown_write(x: Tensor) -> object:
    return torch.ops.offload_write_test.write(x)


def _statistics_write(x: Tensor) -> object:
    batch = torch.arange(8.0).reshape(2, 4)
    return torch.nn.functional.batch_norm(batch, x[0], torch.ones(4), training=True)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda x: x.mul_(3.0),
    "out": lambda x: torch.mul(x, 3.0, out=x),
    "a part": lambda x: x[0].zero_(),
    "past the counter": lambda x: x.data.mul_(3.0),
    "lists": lambda x: torch._foreach_mul_([x], 3.0),
    "statistics": _statistics_write,
    "unknown op": _unknown_write,
}


@pytest.fixture
def unknown_op() -> Iterator[None]:
    """An op that writes what it is given, of which nothing is known."""
    library = torch.library.Library("offload_write_test", "DEF")
    library.define("write(Tensor(a!) x) -> ()")

    def write(x: Tensor) -> None:
        x.data.mul_(3.0)

    library.impl("write", write, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.usefixtures("unknown_op")
@pytest.mark.parametrize("write", WRITES)
def test_write_in_the_step_changes_no_replay(write: str) -> None:
    """What is written after calls have read it is to their replays as it was, whatever writes it."""
    (w,), x = weights((4, 4)), torch.randn(4, 4)
    before = x.clone()

    def step(change: Callable[[Tensor], object] | None = None) -> Tensor:
        out = (x.mul(2.0) * w).sin().exp().sum()
        if change is not None:
            change(x)
        return out

    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(lambda: step(WRITES[write]), (w,))
    found = []
    for engine in ("native", "python"):
        x.data.copy_(before)
        found.append(ran(lambda: step(WRITES[write]), (w,), program, engine))
        assert not torch.equal(x, before)
    assert [bits for bits, *_ in found] == [plain, plain]
    assert shown(found[0][1]) == shown(found[1][1])
    assert found[0][1].has_materialized


def test_saved_tensor_that_was_written_past_its_counter_is_read_as_it_is() -> None:
    """As plainly: what autograd saved has the storage's later contents, replay or not."""
    (w,) = weights((4, 4))

    def step(write: bool = False) -> Tensor:
        h = w * 2.0
        out = h.sin()
        if write:
            h.data.mul_(3.0)
        return out.sum()

    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(lambda: step(write=True), (w,))
    found = [ran(lambda: step(write=True), (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert shown(found[0][1]) == shown(found[1][1])


@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
def test_write_to_what_autograd_was_given_is_met_by_who_reads_it_next(action: Action, is_counted: bool) -> None:
    """A custom backward that writes what it saved: others that saved it too raise or read what it wrote, as plainly."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            if writes:
                (x if is_counted else x.data).mul_(3.0)
            return grad.clone()

    (w,) = weights((4, 4))

    def step() -> Tensor:
        h = w * 2.0
        return h.sin().sum() + Writes.apply(h).sum()  # whose backward comes first

    writes = False
    program = compiled(step, action)
    writes = True
    found: list[list[bytes] | str] = []
    for engine in ("plain", "native", "python"):
        w.grad = None
        scope = under(program, engine, inline_lanes()) if engine != "plain" else contextlib.nullcontext()
        try:
            with scope:
                step().backward()
            found.append(gradients((w,)))
        except RuntimeError as error:
            found.append(str(error).split("[")[0])
    assert found[1] == found[2]
    assert found[1] == found[0]


def test_write_to_what_autograd_was_given_is_noticed_by_replays() -> None:
    """What a custom backward writes is read by no replay: that is made before, or raises, in both engines."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, read: Tensor) -> Tensor:
            ctx.save_for_backward(read)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (read,) = ctx.saved_tensors
            if writes:
                read.mul_(3.0)
            return grad.clone(), None

    (w,) = weights((4, 4))

    def step() -> Tensor:
        h = w.detach() * 2.0
        return (h.exp() * w).sum() + Writes.apply(w, h).sum()  # whose backward comes first

    writes = False
    program = compiled(step, "recompute")
    writes = True
    w.grad = None
    plain = plainly(step, (w,))[0]
    found: list[object] = []
    for engine in ("native", "python"):
        w.grad = None
        try:
            with under(program, engine, inline_lanes()):
                step().backward()
            found.append(gradients((w,)))
        except StaleInputError as error:
            found.append(str(error))
    assert found[0] == found[1]
    assert isinstance(found[0], str) or found[0] == [plain]


def test_replays_are_out_of_the_autocast_around_backward() -> None:
    """Calls are recorded below autocast: in replays it casts nothing, whatever backward runs in."""
    (w, v), x = weights((8, 8), (8, 8)), torch.randn(4, 8)

    def step() -> Tensor:
        return ((x @ v.detach()) @ w).sum()

    program = compiled(step, "recompute")
    w.grad = None
    found = []
    for engine in ("plain", "native", "python"):
        with under(program, engine, inline_lanes()) if engine != "plain" else contextlib.nullcontext():
            loss = step()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss.backward()
        found.append(gradients((w,)))
    assert found[1:] == [found[0], found[0]]


def test_statistics_that_are_only_read_are_those_of_the_first_run() -> None:
    """They change behind every counter, out of sight: replays read them as they were."""
    (w,), mean, var, x = weights((4,)), torch.zeros(4), torch.ones(4), torch.randn(6, 4)

    def step() -> Tensor:
        h = torch.nn.functional.batch_norm(x.mul(2.0), mean, var, training=False)
        return (h * w).sum()

    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(step, (w,))[0]
    for engine in ("native", "python"):
        with under(program, engine, inline_lanes()):
            loss = step()
        mean.data.add_(1.0)
        loss.backward()
        assert gradients((w,)) == [plain]
        mean.data.zero_()


@pytest.mark.parametrize("length", [1, 3])
def test_op_that_makes_more_or_fewer_tensors_leaves_the_plan(length: int) -> None:
    """Both engines say how many it made, and give the plain bits."""
    (w,) = weights((4, 4))

    def step(length: int = 2) -> Tensor:
        made = torch._foreach_mul([w.detach()] * length, 2.0)
        return sum(((each * w).sin().sum() for each in made), torch.zeros(()))

    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(lambda: step(length), (w,))
    found = [ran(lambda: step(length), (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert f"made {length} tensors in place of 2" in found[0][1].deviation
    assert shown(found[0][1]) == shown(found[1][1])
    assert found[0][2] == found[1][2]


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("rows", [7, 4, 8])
def test_smaller_steps_follow_a_plan_whose_sizes_are_bounds(rows: int, action: Action) -> None:
    """A larger one leaves it; all give the plain bits, and both engines say the same."""
    (w,), x = weights((8, 8)), torch.randn(8, 8)

    def step(rows: int = 7) -> Tensor:
        h = x[:rows].mul(2.0)
        for _ in range(3):
            h = (h @ w).sin()
        return h.exp().sum()

    program = dataclasses.replace(compiled(step, action), is_bound=True)
    w.grad = None
    plain = plainly(lambda: step(rows), (w,))
    found = [ran(lambda: step(rows), (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert bool(found[0][1].deviation) == (rows > 7)
    assert shown(found[0][1]) == shown(found[1][1])
    assert found[0][2] == found[1][2]


def test_copy_in_place_of_a_tensor_saved_again_leaves_such_a_plan() -> None:
    """At some lengths an op copies what it takes as it is at others: both engines say so."""
    (w,) = weights((4, 6))

    def step(columns: int = 6) -> Tensor:
        h = w * 2.0
        return h.sin().sum() + h[:, :columns].contiguous().cos().sum()

    program = dataclasses.replace(compiled(step, "swap"), is_bound=True)
    w.grad = None
    plain = plainly(lambda: step(5), (w,))
    found = [ran(lambda: step(5), (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert "a copy was saved where a tensor was to be saved again" in found[0][1].deviation
    assert shown(found[0][1]) == shown(found[1][1])


def test_engines_are_at_the_same_op_however_the_step_varies() -> None:
    """Ops that come, go and change places: the core knows its place among them as Python does."""
    (w,), x = weights((4,)), torch.randn(4)
    others = ("sin", "cos", "exp", "tanh")

    def step(names: list[str]) -> Tensor:
        made = [x.mul(2.0) * w if name == "mul" else getattr(torch, name)(x) for name in names]
        return torch.stack([each for each in made if each.requires_grad]).sum()

    for seed in range(60):
        rng = random.Random(seed)
        planned = [rng.choice(others) for _ in range(rng.choice([12, 150]))]
        for place in sorted(rng.sample(range(len(planned)), 3)):
            planned.insert(place, "mul")
        program = compiled(lambda planned=planned: step(planned), "recompute")
        follower = ByOrdinal(program)
        rate, names = rng.choice([0.02, 0.1, 0.4]), list[str]()
        for name in planned:
            fate = rng.random()
            names += [] if fate < rate else [name, rng.choice(others)] if fate < 2 * rate else [name]
        names += [rng.choice(others) for _ in range(rng.choice([0, 80]))]
        with under(program, "native", inline_lanes()) as executor, torch.no_grad():
            for name in names:
                is_left = executor.has_deviated
                getattr(x, name)(*((2.0,) if name == "mul" else ()))
                if is_left:
                    break
                follower.op({"mul": "aten.mul.Tensor"}.get(name, f"aten.{name}.default"))
                assert executor._step.place == follower._next_op, seed
                assert executor._step.num_stray_ops == follower._num_stray_ops, seed
                assert follower.refusal in executor.deviation, seed
                assert bool(follower.refusal) == executor.has_deviated, seed


def test_intermediate_memory_goes_with_each_backward_of_a_step() -> None:
    """What replays read and nothing makes again is let go of when nobody needs it, after a second backward as well."""
    (w,), x = weights((32, 32)), torch.randn(32, 32)
    read: list[weakref.ref[torch.UntypedStorage]] = []

    def step() -> Tensor:
        h = torch.mul(x, 1.5, out=x.new_empty(32, 32))  # of which there is no replay
        read.append(weakref.ref(h.untyped_storage()))
        return (h * w).sum() + (h.mul(2.0).sin() * w).sum()

    program = compiled(step, "recompute", only=lambda place: place != 0)
    for engine in ("native", "python"):
        with under(program, engine, inline_lanes()):
            for _ in range(2):
                loss = step()
                loss.backward()
                del loss
                assert read[-1]() is None


@pytest.mark.parametrize("case", CASES)
def test_engines_do_the_same_under_any_plan(case: str) -> None:
    """Whatever leaves where and when, and comes back ahead or not: bits, copies, and what is there after forward."""
    step, leaves = CASES[case]()
    graph = record(lambda: step().backward())
    for leaf in leaves:
        leaf.grad = None
    plain, problem = plainly(step, leaves), Problem(graph)
    for seed in range(6):
        rng = random.Random(f"{case} {seed}")
        weights = rng.choice([(1, 1, 1), (0, 1, 1), (0, 1, 0), (1, 0, 4)])
        chosen = [decide(rng, graph, problem, candidate, weights) for candidate in problem.candidates.values()]
        program = compile_plan(graph, plan_of(graph, *(decision for decision in chosen if decision is not None)))
        if core_for(program, CPU) is None:
            continue
        found = []
        for engine in ("native", "python"):
            torch.manual_seed(3)
            with under(program, engine, lanes := LateLanes()) as executor:
                loss = step()
                values = executor._table.all_indexed()
                there = {value.index: value.live() is not None for value in values if value.has_handle}
                del values
                loss.backward()
            bits = [*gradients(leaves), bytes(torch.get_rng_state().numpy().tobytes())]
            assert bits == plain, (seed, engine)
            found.append((there, lanes.events, shown(executor)))
        assert found[0] == found[1], seed


@pytest.mark.parametrize("action", ["swap", "recompute"])
def test_writes_and_parameters_of_a_step_that_has_left_the_plan(action: Action) -> None:
    """What is written in place leaves the device as its new value; neither parameters nor what was given ever do."""
    torch.manual_seed(0)
    layer, x, y = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    leaves = tuple(layer.parameters())

    def step(length: int = 2) -> Tensor:
        h = layer(y)
        for _ in range(length):
            h = torch.relu_(layer(torch.tanh(h)))
        x.mul_(1.0)
        return (layer(x) * h).sum()

    program = compiled(step, action)
    for leaf in leaves:
        leaf.grad = None
    plain = plainly(lambda: step(5), leaves)
    found = [ran(lambda: step(5), leaves, program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert found[0][1].deviation
    assert shown(found[0][1]) == shown(found[1][1])
    assert found[0][2] == found[1][2]


def test_value_whose_call_cannot_be_recorded_stays() -> None:
    """The plan says to recompute it, but what it is made of is no plain tensor in this step."""
    (w,), x, y = weights((4, 4)), torch.randn(4, 4), torch.randn(4, 4)

    def step(is_sparse: bool = False) -> Tensor:
        return (torch.mm(sparse if is_sparse else x, y) * w).sum()

    sparse = x.to_sparse()
    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(lambda: step(is_sparse=True), (w,))
    found = [ran(lambda: step(is_sparse=True), (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert shown(found[0][1]) == shown(found[1][1])


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
def test_looking_at_what_is_saved_is_no_unpack_of_the_plan(action: Action) -> None:
    """A program may read it from autograd's nodes; what backward unpacks is counted as if it had not."""
    (w,) = weights((4, 4))

    def step(looks: bool = False) -> Tensor:
        h = (w * 2.0).sin()
        if looks:
            assert torch.equal(h.grad_fn._saved_self, w * 2.0)  # type: ignore[union-attr]
        return h.exp().sum()

    program = compiled(step, action)
    w.grad = None
    plain = plainly(step, (w,))
    counts = []
    for looks in (False, True):
        found = [ran(lambda looks=looks: step(looks), (w,), program, engine) for engine in ("native", "python")]
        assert [bits for bits, *_ in found] == [plain, plain]
        counts.append([executor.num_unpacks for _, executor, _ in found])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
def test_step_that_lacks_what_such_a_plan_counts_on_leaves_it_when_backward_begins(action: Action) -> None:
    """Where sizes are bounds nothing else tells: both engines say what is missing."""
    (w,) = weights((8, 8))

    def step(length: int = 4) -> Tensor:
        h = w
        for _ in range(length):
            h = h.sin()
        return h.sum()

    program = dataclasses.replace(compiled(step, action), is_bound=True)
    w.grad = None
    plain = plainly(lambda: step(2), (w,))
    found = [ran(lambda: step(2), (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert found[0][1].deviation
    assert shown(found[0][1]) == shown(found[1][1])


def test_write_waits_for_a_copy_of_what_was_there() -> None:
    """What is being copied out is written once the copy has it, for calls read it from there."""
    (w,) = weights((4, 4))

    def step(write: bool = False) -> Tensor:
        h = w.detach() * 2.0
        out = (h * w).sum() + (h.exp() * w).sum()
        if write:
            h.data.mul_(3.0)
        return out.sin()

    graph = record(lambda: step().backward())
    first, second = saved_storages(graph)[:2]
    swap = Decision(storage=first, action="swap", release_op=sum(op.phase == "forward" for op in graph.ops) - 1)
    program = compile_plan(graph, plan_of(graph, swap, Decision(storage=second, action="recompute")))
    w.grad = None
    plain = plainly(lambda: step(write=True), (w,))[0]
    for engine in ("native", "python"):
        with under(program, engine, LateLanes()):
            loss = step(write=True)
            loss.backward()
        assert gradients((w,)) == [plain], engine


def test_data_that_was_taken_before_a_save_is_told() -> None:
    """What may be written past its counter stays on the device, where ops are not seen: both engines say so."""
    (w,) = weights((4, 4))

    def step(executor: StepExecutor | None = None) -> Tensor:
        h = w * 2.0
        if executor is not None:
            executor.data_escapes(h.untyped_storage(), h)
        return h.sin().exp().sum()

    program = compiled(step, "swap")
    w.grad = None
    plain = plainly(step, (w,))[0]
    told = []
    for engine in ("native", "python"):
        with under(program, engine, lanes := Log()) as executor:
            step(executor).backward()
        assert gradients((w,)) == [plain]
        told.append((shown(executor), lanes.events))
    assert told[0] == told[1]
    assert executor.took_data
