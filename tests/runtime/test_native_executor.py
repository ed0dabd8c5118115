"""The native core and Python execute one program alike: the same bits, copies, counts, and words."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_offload.errors import ReplayError, StaleInputError
from lightning_offload.graph.memory_plan import Action, Decision
from lightning_offload.runtime import environment
from lightning_offload.runtime.hooks import executing
from lightning_offload.runtime.host_pool import HostPool
from lightning_offload.runtime.native_executor import NativeExecutor, core_for
from lightning_offload.runtime.program import compile_plan
from lightning_offload.runtime.tiers import Tiers
from tests.capture.recording import record
from tests.runtime.engines import CASES, plainly, ran, ran_in_core, shown, under, weights
from tests.runtime.executing import CPU, Step, compiled, gradients, plan_of, saved_storages
from tests.runtime.inline import inline_lanes

pytestmark = pytest.mark.usefixtures("core")


@pytest.mark.parametrize("action", ["keep", "swap", "recompute"])
@pytest.mark.parametrize("case", CASES)
def test_engines_do_the_same(case: str, action: Action) -> None:
    """Bits, the generator, copies in their order, and all that is told are the same in both engines."""
    step, leaves = CASES[case]()
    program = compiled(step, action)
    gradients(leaves) if all(leaf.grad is not None for leaf in leaves) else None
    for leaf in leaves:
        leaf.grad = None
    plain = plainly(step, leaves)
    native_bits, native_executor, native_copies = ran(step, leaves, program, "native")
    python_bits, python_executor, python_copies = ran(step, leaves, program, "python")
    assert native_bits == plain
    assert python_bits == plain
    assert native_copies == python_copies
    assert shown(native_executor) == shown(python_executor)
    assert not native_executor.deviation
    own_bits, times = ran_in_core(step, leaves, program)
    assert own_bits == plain
    for way, copied_bytes in {"out": times.out_bytes, "in": times.in_bytes}.items():
        assert copied_bytes == sum(num_bytes for direction, num_bytes in python_copies if direction == way)


def test_what_comes_back_for_a_replay_alone_leaves_again() -> None:
    """What saved it is gone: each replay that reads it brings it back for itself, and its host copy stays."""
    (w,) = weights((8, 8))

    def step() -> Tensor:
        a = w * 2.0
        saver = a.square()
        out = ((a + 1.0).sin() + (a + 2.0).sin()).sum()
        del saver
        return out

    graph = record(lambda: step().backward())
    first, *others = saved_storages(graph)
    decisions = [Decision(storage=first, action="swap"), *(Decision(storage=s, action="recompute") for s in others)]
    program = compile_plan(graph, plan_of(graph, *decisions))
    w.grad = None
    plain = plainly(step, (w,))
    for engine in ("native", "python"):
        bits, _, copies = ran(step, (w,), program, engine)
        assert bits == plain
        assert copies == [("out", w.nbytes), ("in", w.nbytes), ("in", w.nbytes)]
    bits, times = ran_in_core(step, (w,), program)
    assert bits == plain
    assert (times.out_bytes, times.in_bytes) == (w.nbytes, 2 * w.nbytes)


@pytest.mark.parametrize("sees_ops", [False, True])
def test_mixed_plans_with_ops_seen_or_not(sees_ops: bool) -> None:
    """A plan that needs no op to be seen is executed alike where they are."""
    step, leaves = CASES["transformer"]()
    program = compiled(step, "swap", only=lambda place: place % 3 != 0)
    for leaf in leaves:
        leaf.grad = None
    plain = plainly(step, leaves)
    found = [ran(step, leaves, program, engine, sees_ops=sees_ops) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert found[0][2] == found[1][2]
    assert shown(found[0][1]) == shown(found[1][1])


@pytest.mark.parametrize("action", ["swap", "recompute"])
@pytest.mark.parametrize("other", ["longer", "larger", "other ops"])
def test_step_of_another_structure_leaves_the_plan_alike(other: str, action: Action) -> None:
    """Both engines say the same of where it did, offload the rest, and give the plain bits."""
    (w,), x = weights((8, 8)), torch.randn(4, 8)

    def step(length: int = 4, rows: int = 4, activation: Callable[[Tensor], Tensor] = torch.tanh) -> Tensor:
        h = x[:1].expand(rows, 8) + x[:1]
        for _ in range(length):
            h = activation(h @ w)
        return h.square().sum()

    program = compiled(step, action)
    changed: dict[str, Step] = {
        "longer": lambda: step(length=6),
        "larger": lambda: step(rows=7),
        "other ops": lambda: step(activation=lambda h: torch.sin(torch.cos(h))),
    }
    w.grad = None
    plain = plainly(changed[other], (w,))
    found = [ran(changed[other], (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert found[0][1].deviation
    assert found[0][1].deviation == found[1][1].deviation
    assert found[0][2] == found[1][2]
    assert shown(found[0][1]) == shown(found[1][1])


def test_saved_tensor_that_was_modified_raises_as_plainly() -> None:
    """The message is that of plain autograd, but for the hint."""
    (w,) = weights((4,))

    def step(write: bool = False) -> Tensor:
        h = w * 2.0
        out = h.sin()
        if write:
            h.add_(1.0)
        return out.sum()

    for action in ("keep", "swap", "recompute"):
        messages = []
        program = compiled(step, action)
        for engine in ("plain", "native", "python"):
            scope = under(program, engine, inline_lanes()) if engine != "plain" else contextlib.nullcontext()
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught, scope:
                step(write=True).backward()
            messages.append(str(caught.value).split("Hint")[0].replace(", which is output 0 of MulBackward0,", ""))
        assert messages[0].split("[")[0] == messages[1].split("[")[0]
        assert messages[1] == messages[2]


def test_input_written_past_its_counter_is_not_replayed_from() -> None:
    """A replay that would read what was written since raises; never does it give other bits."""
    (w,), x = weights((4, 4)), torch.randn(4, 4)
    program = compiled(lambda: (x.mul(2.0) @ w).sin().sum(), "recompute")
    for engine in ("native", "python"):
        with under(program, engine, inline_lanes()):
            loss = (x.mul(2.0) @ w).sin().sum()
        x.add_(1.0)
        with pytest.raises(StaleInputError, match="modified in place"):
            loss.backward()
        x.sub_(1.0)


def test_write_that_replays_need_is_settled_before() -> None:
    """What is written in the step itself is read as it was, in both engines, and both say so."""
    (w,), x = weights((4, 4)), torch.randn(4, 4)

    def step(write: bool = False) -> Tensor:
        state = x.clone()
        out = (state.mul(2.0) * w).sin().exp()
        if write:
            state.zero_()
        return out.sum()

    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(lambda: step(write=True), (w,))
    found = [ran(lambda: step(write=True), (w,), program, engine) for engine in ("native", "python")]
    assert [bits for bits, *_ in found] == [plain, plain]
    assert shown(found[0][1]) == shown(found[1][1])


def test_write_of_another_step_is_settled_before() -> None:
    """A step whose replays are pending hears of writes that another step makes, in whatever engine that runs."""
    (w,), x = weights((4, 4)), torch.randn(4, 4)
    program = compiled(lambda: (x.mul(2.0) @ w).sin().sum(), "recompute")
    for first in ("native", "python"):
        for second in ("native", "python"):
            w.grad = None
            plain = plainly(lambda: (x.mul(2.0) @ w).sin().sum(), (w,))[0]
            with under(program, first, inline_lanes()):
                loss = (x.mul(2.0) @ w).sin().sum()
            before = x.clone()
            with under(program, second, inline_lanes()), torch.no_grad():
                x.mul_(3.0)
            loss.backward()
            assert gradients((w,)) == [plain]
            x.copy_(before)


@pytest.mark.parametrize("seed", range(6))
def test_given_memory_is_watched_through_every_counter_that_it_is_read_by(seed: int) -> None:
    """Written after the scope through whatever it was read by, or was taken from, it is noticed or changes nothing."""
    (w,), x = weights((4, 4)), torch.randn(4, 4)
    draw = random.Random(seed)
    ways = [draw.choice(("data", "itself", "view", "detach")) for _ in range(3)]

    def step() -> tuple[Tensor, list[Tensor]]:
        read, out = [x], w * 0.0
        for way in ways:
            alias = {"data": x.data, "itself": x, "view": x.view(4, 4), "detach": x.detach()}[way]
            read.append(alias)
            out = out + alias.mul(3.0) * w
        return out.sum(), read

    program = compiled(lambda: step()[0], "recompute")
    for n in range(len(ways) + 1):
        for engine in ("native", "python"):
            w.grad = None
            before = x.clone()
            loss, read = step()
            loss.backward()
            plain = gradients((w,))
            with under(program, engine, inline_lanes()):
                loss, read = step()
            read[n].add_(5.0)
            with contextlib.suppress(StaleInputError):
                loss.backward()
                assert gradients((w,)) == plain
            x.data.copy_(before)


@pytest.mark.parametrize("outer", ["native", "python"])
@pytest.mark.parametrize("inner", ["native", "python"])
@pytest.mark.parametrize("action", ["swap", "recompute"])
def test_memory_exposed_in_one_step_and_written_in_another_is_as_in_plain_autograd(
    outer: str, inner: str, action: Action
) -> None:
    """What has left the device by a step that sees its ops follows what another one, within it, writes unseen by it."""
    (w,) = weights((4, 4))
    within = compiled(lambda: (w * 2).sin().sum(), "swap")

    def step(scope: Callable[[], contextlib.AbstractContextManager[object]], *, is_written: bool = True) -> Tensor:
        h = w.detach() * 1.0
        exposed, first = h.data, h * w
        with scope():
            if is_written:
                exposed.mul_(3.0)
        return (h * w).sum() + first.sum()

    program = compiled(lambda: step(contextlib.nullcontext, is_written=False), action)
    w.grad = None
    plain = plainly(lambda: step(contextlib.nullcontext), (w,))
    bits, executor, _ = ran(
        lambda: step(lambda: under(within, inner, inline_lanes(), sees_ops=True)), (w,), program, outer, sees_ops=True
    )
    assert bits == plain
    assert executor.deviation == ""


def test_memory_behind_another_counter_is_not_relied_on_after_the_scope() -> None:
    """A result that is gone leaves a counter that counts for nobody: a write through another one changes nothing."""
    (w,) = weights((6,))

    def step() -> tuple[Tensor, Tensor]:
        h = w.detach() * 1.0
        seen = h.data.mul_(2.0)
        return (h.mul(3.0) * w).sum(), seen

    def parts() -> tuple[Tensor, Tensor]:
        _, second = torch.unsafe_chunk(w.detach() * 1.0, 2)
        return (second.mul(3.0) * w[:3]).sum(), second

    for make in (step, parts):
        program = compiled(lambda make=make: make()[0], "recompute")
        w.grad = None
        make()[0].backward()
        plain = gradients((w,))
        for engine in ("native", "python"):
            with under(program, engine, inline_lanes()):
                loss, exposed = make()
            exposed.add_(5.0)
            try:
                loss.backward()
            except StaleInputError:
                w.grad = None
                continue
            assert gradients((w,)) == plain


def test_replayed_values_go_with_the_backward_that_read_them() -> None:
    """Also where there are several in one step: nothing that was made again stays on the device."""
    (w,), x = weights((64, 64)), torch.randn(64, 64)

    def step() -> Tensor:
        h = x
        for _ in range(4):
            h = (h @ w).sin()
        return h.sum()

    program = compiled(step, "recompute")
    storages: list[weakref.ref[torch.UntypedStorage]] = []
    with under(program, "native", inline_lanes()) as executor:
        for _ in range(2):
            loss = step()
            loss.backward()
            del loss
            storages += [
                weakref.ref(value.live()) for value in executor._step.all_indexed() if value.live() is not None
            ]
            assert not [s for s in storages if s() is not None and s().nbytes() == 4 * 64 * 64]  # type: ignore[union-attr]


def test_ops_that_hold_the_gil_wait_without_it() -> None:
    """Indexing holds the GIL while it is dispatched, and an unpack in another thread may wait for that."""
    (w,), x = weights((32, 32)), torch.randn(32, 32)

    def step() -> Tensor:
        return (x @ w).sin().exp().sum()

    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(step, (w,))[0]
    found: list[bool] = []

    def train() -> None:
        for _ in range(20):
            leaf = w.detach().clone().requires_grad_()
            with under(program, "native", inline_lanes()):
                (x @ leaf).sin().exp().sum().backward()
            found.append(gradients((leaf,)) == [plain])

    thread = threading.Thread(target=train)
    with under(program, "native", inline_lanes()):
        thread.start()
        while thread.is_alive():
            torch.tensor([1.0])[0].data.add_(1.0)
        thread.join()
    assert found == [True] * 20


def test_op_that_is_registered_anew_is_another_one() -> None:
    """As a cell of a notebook that is run twice: the core asks again what it is."""
    for schema, call in (("again(Tensor x) -> Tensor", 1), ("again(Tensor x, Tensor y) -> Tensor", 2)):
        library = torch.library.Library("offload_again_test", "DEF")
        library.define(schema)
        library.impl("again", lambda *tensors: tensors[-1].clone(), "CompositeExplicitAutograd")
        (w,) = weights((4,))

        def step(w: Tensor = w, call: int = call) -> Tensor:
            parts = [w.detach() * 2.0, w.detach() * 3.0][:call]
            return (torch.ops.offload_again_test.again(*parts) * w).sin().sum()

        program = compiled(step, "recompute")
        w.grad = None
        assert ran(step, (w,), program, "native")[0] == plainly(step, (w,))
        library._destroy()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ZeroDivisionError


def test_nothing_is_left_behind_by_exceptions() -> None:
    """Neither by one in an op nor by one in backward: ops are out of sight again, and the step is over."""
    (w,) = weights((4, 4))
    program = compiled(lambda: (w @ w).sin().sum(), "recompute")
    with pytest.raises(RuntimeError), under(program, "native", inline_lanes()) as executor:
        (w @ torch.ones(3)).sum()
    assert executor.is_spent
    with pytest.raises(ZeroDivisionError), under(program, "native", inline_lanes()) as executor:
        _Fails.apply((w @ w).sin()).sum().backward()
    assert executor.num_packs > 0
    num_packs = executor.num_packs
    (w @ w).sin().sum().backward()
    assert executor.num_packs == num_packs


def test_chain_as_deep_as_ten_thousand_calls_is_let_go_of() -> None:
    """Each call owns what makes its inputs: that is no recursion, on however small a stack."""
    (w,) = weights((2,))

    def step() -> Tensor:
        h = w
        for _ in range(10_000):
            h = h * 1.0001
        return (h.sin() * h.cos()).sum()

    program = compiled(step, "recompute")
    w.grad = None
    plain = plainly(step, (w,))
    size = threading.stack_size(512 << 10)
    found: list[bool] = []
    try:
        thread = threading.Thread(target=lambda: found.append(ran(step, (w,), program, "native")[0] == plain))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    assert found == [True]


def test_replay_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel raises in a replay is told with the op's name."""
    (w,), library = weights((4, 4)), torch.library.Library("offload_native_test", "DEF")
    library.define("once(Tensor x) -> Tensor")
    calls: list[int] = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise ValueError("no more")
        return x.clone()

    library.impl("once", once, "CompositeExplicitAutograd")
    from lightning_offload.tensors import op_facts

    monkeypatch.setattr(op_facts, "_NAMESPACES", frozenset({"aten", "prims", "offload_native_test"}))

    def step() -> Tensor:
        return torch.ops.offload_native_test.once(w.detach() * 2.0).mul(w).sum()

    program = compiled(step, "recompute")
    with under(program, "native", inline_lanes()):
        loss = step()
    calls.extend([1] * 3)
    with pytest.raises(ReplayError, match=r"once.*could not be run again: .*no more"):
        loss.backward()
    library._destroy()


@pytest.mark.parametrize("memo", [True, False])
def test_calls_run_as_often_in_both_engines(memo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value made on the way to another one stays where the plan says so, and is made anew where it does not."""
    from lightning_offload.tensors import op_facts

    monkeypatch.setattr(op_facts, "_NAMESPACES", frozenset({"aten", "prims", "offload_count_test"}))
    (w,), library = weights((4, 4)), torch.library.Library("offload_count_test", "DEF")
    library.define("counted(Tensor x) -> Tensor")
    calls: list[int] = []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2.0

    library.impl("counted", counted, "CompositeExplicitAutograd")

    def step() -> Tensor:
        h, out = w.detach().mul(2.0), torch.zeros(())
        for _ in range(4):
            h = torch.ops.offload_count_test.counted(h)
            out = out + (h * w).sum()
        return out

    graph = record(lambda: step().backward())
    decisions = [Decision(storage=s, action="recompute", memo=memo) for s in saved_storages(graph)]
    program = compile_plan(graph, plan_of(graph, *decisions))
    w.grad = None
    plain = plainly(step, (w,))
    counts = []
    for engine in ("native", "python"):
        calls.clear()
        assert ran(step, (w,), program, engine)[0] == plain
        counts.append(len(calls))
    assert counts == ([8, 8] if memo else [4 + 4 + 3 + 2 + 1] * 2)
    library._destroy()


def test_every_setting_that_calls_carry_is_watched(core: ModuleType) -> None:
    """The core notices the change of each setting that a recorded call is replayed under."""
    for is_cpu, settings in ((True, environment._ON_CPU), (False, environment._ON_CUDA)):
        for setting in (*environment._EVERYWHERE, *settings):
            value = setting.read()
            other = _other(value)
            before = core.settings(is_cpu)
            try:
                setting.write(other)
            except RuntimeError:  # this machine cannot have it
                continue
            try:
                changed = setting.read() != value
                assert (core.settings(is_cpu) != before) == changed, (setting.read, value, other)
            finally:
                setting.write(value)
            assert core.settings(is_cpu) == before


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(not item for item in value)
    if isinstance(value, int):
        return value + 1
    if isinstance(value, torch.dtype):
        return torch.float64
    if isinstance(value, str):
        return "ieee" if value != "ieee" else "tf32"
    return value


def test_settings_of_a_call_are_those_of_its_replay() -> None:
    """A part of forward under other settings is replayed under them, and they are put back."""
    (w, v), x = weights((8, 8), (8, 8)), torch.randn(8, 8)
    seen: list[bool] = []

    def step() -> Tensor:
        h = x @ w.detach()
        torch.set_flush_denormal(True)
        try:
            h = (h * 1e-42).mul(1.0)
        finally:
            torch.set_flush_denormal(False)
        return (h * v).sum() + (x @ w).sin().sum()  # the gradient of v is what was flushed

    program = compiled(step, "recompute")
    w.grad = v.grad = None
    plain = plainly(step, (w, v))
    for engine in ("native", "python"):
        bits, _, _ = ran(step, (w, v), program, engine)
        assert bits == plain
        seen.append(environment._flushes_denormals())
    assert seen == [False, False]


@pytest.mark.parametrize("case", CASES)
def test_step_has_the_ops_that_were_recorded(case: str) -> None:
    """Nothing is seen when a step is recorded that is not seen, in its place, when it is executed."""
    step, leaves = CASES[case]()
    program = compiled(step, "recompute")
    for leaf in leaves:
        leaf.grad = None
    found = core_for(program, CPU)
    assert found is not None
    executor = NativeExecutor(
        found, device=CPU, tiers=Tiers(inline_lanes(), HostPool()), program=program, sees_ops=True
    )
    with executing(executor):
        step().backward()
    assert executor._step.place == program.num_first_ops
    assert executor._step.num_stray_ops == 0
