"""One mode and one pair of hooks, in force inside and gone outside; ops below them give what they give without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_offload import MemoryPlugin
from lightning_offload.capture.live import LiveBytes
from lightning_offload.capture.recorder import Recorder
from lightning_offload.runtime import kernel_keys
from lightning_offload.runtime.executor import StepExecutor
from lightning_offload.runtime.hooks import StepMode, executing, watch_backward
from lightning_offload.tensors.observer import StepObserver, observe_all
from lightning_offload.tensors.op_facts import OpFacts
from tests.runtime.executing import CPU, compiled, executor_for, gradients, plain, planned, under

MASK = torch.rand(4, 10, 30, generator=torch.Generator().manual_seed(1)) < 0.2
TARGET = (torch.arange(300).view(10, 30) % 7 / 7.0).bfloat16()
WEIGHT = 1.0 + torch.arange(30) / 7.0

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "prod": lambda x: (x + 1.1).prod(1) + (x + 1.0).prod() * 1e-9,
    "cumprod": lambda x: (x + 1.1).cumprod(1),
    "max": lambda x: x.round(decimals=1).max(),
    "min": lambda x: x.round(decimals=1).min(),
    "median": lambda x: x.round(decimals=1).median(),
    "nanmedian": lambda x: x.round(decimals=1).nanmedian(),
    "masked-fill": lambda x: x.sin().expand(4, 10, 30).masked_fill(MASK, (x * x).mean()),
    "masked-fill-in-place": lambda x: x.sin().repeat(4, 1, 1).masked_fill_(MASK, (x * x).mean()),
    "det": lambda x: torch.linalg.det(x.view(3, 10, 10)),
    "eig": lambda x: torch.linalg.eig(x.view(3, 10, 10))[0].abs(),
    "eigh": lambda x: torch.linalg.eigh(x.view(3, 10, 10))[1].abs(),
    "matrix-exp": lambda x: torch.linalg.matrix_exp(x.view(3, 10, 10)),
    "householder": lambda x: torch.linalg.householder_product(x.t()[:, :8], x.mean(1)[:8]),
    "ormqr": lambda x: torch.ormqr(x.t()[:, :8], x.mean(1)[:8], x.t()),
    "binary-cross-entropy": lambda x: F.binary_cross_entropy(x.sigmoid(), (x * 0.5).sigmoid(), WEIGHT),
    "with-logits": lambda x: F.binary_cross_entropy_with_logits(x, TARGET.float(), WEIGHT, pos_weight=WEIGHT),
    "with-logits-in-bfloat16": lambda x: F.binary_cross_entropy_with_logits(x.bfloat16(), TARGET, WEIGHT).float(),
}


def matrix() -> Tensor:
    """A trainable matrix whose gradients round."""
    generator = torch.Generator().manual_seed(5)
    return (torch.randn(10, 30, generator=generator) * 0.5).requires_grad_()


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_that_ask_for_modes(name: str) -> None:
    """A backward whose ops are seen gives the bits of plain PyTorch."""
    x, formula = matrix(), FORMULAS[name]

    def step() -> Tensor:
        made = formula(x * 1.25)
        return (made * made.detach().cos()).sum()

    found, ran = planned(step, x, program=None)
    assert ran.executor.watches_backward
    assert found == plain(step, x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_within_a_checkpoint(reentrant: bool) -> None:
    """Checkpointing has hooks of its own; the formulas under it are found all the same."""
    x = matrix()

    def step() -> Tensor:
        made = checkpoint(lambda t: (t + 1.1).prod(1).sin(), x * 1.25, use_reentrant=reentrant)
        assert isinstance(made, Tensor)
        return made.sum()

    assert planned(step, x, program=None)[0] == plain(step, x)


@pytest.mark.parametrize("policy", ["all-swap", "all-recompute"])
@pytest.mark.parametrize("how", ["reentrant-checkpoint", "backward-in-hook", "grad-in-hook"])
def test_within_a_backward_of_the_program_s_own(how: str, policy: str) -> None:
    """Where user code in backward is seen there are two modes, and such a node runs without both."""

    def inner(t: Tensor) -> Tensor:
        return ((t * 0.1 + 1.0).prod(1, keepdim=True) * 3.3).sin() + t

    def hook(gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            t = gradient.detach().requires_grad_()
            if how == "grad-in-hook":
                return gradient + torch.autograd.grad(inner(t).sum(), t)[0]
            inner(t).sum().backward()
            assert t.grad is not None
            return gradient + t.grad

    def run(memory: MemoryPlugin | None) -> list[bytes]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(30, 64), torch.nn.Tanh(), torch.nn.Linear(64, 30))
        found = []
        with memory or contextlib.nullcontext():
            for _ in range(5):
                with memory.step() if memory is not None else contextlib.nullcontext():
                    out = model(matrix().detach())
                    if how == "reentrant-checkpoint":
                        out = checkpoint(inner, out, use_reentrant=True)
                    else:
                        out.register_hook(hook)
                    out.square().mean().backward()
                found += [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
                model.zero_grad()
        return found

    assert run(MemoryPlugin(budget="64MiB", policy=policy)) == run(None)


def test_formulas_differentiated_again() -> None:
    """A gradient with a graph of its own has the bits of plain PyTorch, and so has its gradient."""
    x = matrix()

    def step() -> Tensor:
        y = x * 1.25
        (first,) = torch.autograd.grad(torch.linalg.det(y.view(3, 10, 10)).sum(), y, create_graph=True)
        (second,) = torch.autograd.grad((y + 1.1).prod(1).sum(), y, create_graph=True)
        return (first * second).sin().sum()

    assert planned(step, x, program=None)[0] == plain(step, x)


class _Names(StepObserver):
    """Notes the ops that it is told of."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @override
    def on_op(self, facts: OpFacts, *args: object, **kwargs: object) -> None:
        self.names.append(facts.name)


def test_the_mode_is_off_for_such_nodes_alone() -> None:
    """The nodes before and after are seen, and the graph keeps no hook of ours."""
    x, observer = matrix(), _Names()
    with executing(executor_for(None, observer=observer)):
        loss = x.sin().prod(1).exp().sum()
        observer.names.clear()
        loss.backward(retain_graph=True)
    assert "aten.cos.default" in observer.names
    assert not any("prod" in name for name in observer.names)
    seen: list[str] = []

    def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(str(func))
        return func(*args, **kwargs)

    with StepMode(dispatch):
        loss.backward()
    assert any("cumprod" in name for name in seen)


def hooks() -> object:
    """The saved-tensor hooks in force."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def vector() -> Tensor:
    """A trainable vector."""
    return torch.linspace(-1.0, 1.0, 300).requires_grad_()


def test_in_force_inside_and_gone_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode and the hooks are on inside, and off after a normal end and after an exception."""
    monkeypatch.setenv("LIGHTNING_OFFLOAD_ENGINE", "python")
    for fails in (False, True):
        try:
            with executing(executor_for(None)):
                assert isinstance(_get_current_dispatch_mode(), StepMode)
                assert hooks() is not None
                if fails:
                    raise KeyError("on purpose")
        except KeyError:
            assert fails
        assert _get_current_dispatch_mode() is None
        assert hooks() is None


def test_mode_is_an_infra_mode() -> None:
    """Compiled modules stay compiled under it, and higher-order operators pass."""
    assert StepMode.is_infra_mode()
    assert StepMode.ignore_compile_internals()
    assert StepMode.supports_higher_order_operators


@pytest.mark.parametrize("action", ["swap", "recompute", None])
def test_functorch_inside_a_step(action: str | None) -> None:
    """``torch.func`` transforms run inside a step and give what they give outside; the step stays exact."""
    x = vector()

    def step() -> Tensor:
        inner = torch.func.vmap(torch.func.grad(lambda v: (v.sin() * v).sum()))(x.detach().view(10, 30))
        return ((x * 2.0).sin() * inner.view(-1)).exp().sum()

    program = compiled(step, action) if action else None  # type: ignore[arg-type]
    x.grad = None
    found, ran = planned(step, x, program=program)
    assert found == plain(step, x)
    assert not ran.executor.has_deviated


def test_disabling_hooks_is_undone() -> None:
    """``disable_saved_tensors_hooks`` takes ours off inside, puts them back after, and is torch's own outside."""
    original = torch.autograd.graph.disable_saved_tensors_hooks
    with executing(executor_for(None)):
        ours = hooks()
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            assert not torch._C._autograd._saved_tensors_hooks_is_enabled()
            with pytest.raises(RuntimeError, match="no hooks here"):
                torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t, lambda t: t)
        assert hooks() == ours
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()
    assert torch.autograd.graph.disable_saved_tensors_hooks is original


def test_other_hooks_inside_win() -> None:
    """What is saved under a user's own hooks is the user's; ours take the rest."""
    x, seen = vector(), []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    def step() -> Tensor:
        y = x.sin()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            y = y.exp()
        return y.cos().sum()

    expected = plain(step, x)
    seen.clear()
    with under(None) as ran:
        step().backward()
    assert gradients((x,)) == expected[:1]
    assert len(seen) == 1
    assert ran.executor.num_unpacks == 2


def test_checkpoint_inside_a_step() -> None:
    """A user's own checkpointing keeps working inside a step."""
    x = vector()

    def step() -> Tensor:
        y = torch.utils.checkpoint.checkpoint(lambda v: v.sin().exp().cos(), x * 2.0, use_reentrant=False)
        return (y * y).sum()

    for action in ("swap", "recompute"):
        program = compiled(step, action)  # type: ignore[arg-type]
        x.grad = None
        assert planned(step, x, program=program)[0] == plain(step, x)


def test_steps_may_nest() -> None:
    """An executor inside another serves what is saved inside; the outer one goes on afterwards."""
    x = vector()
    with under(None) as outer:
        y = x.sin()
        with under(None) as inner:
            y = y.exp()
        y.cos().sum().backward()
    assert (outer.executor.num_unpacks, inner.executor.num_unpacks) == (2, 1)
    assert gradients((x,)) == plain(lambda: x.sin().exp().cos().sum(), x)[:1]


def test_without_hooks_ops_alone_are_seen() -> None:
    """Around a backward that is only watched nothing is packed."""
    with executing(executor_for(None), hooks=False):
        assert hooks() is None


def test_watched_backwards() -> None:
    """Every way to call backward passes the watcher once, until the watch ends."""
    entered: list[int] = []

    class Around:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *exc: object) -> None:
            entered.append(-1)

    x = vector()
    end = watch_backward(Around)  # type: ignore[arg-type]
    try:
        x.sin().sum().backward()
        torch.autograd.grad(x.sin().sum(), x)
        torch.autograd.backward([x.sin().sum()])
    finally:
        end()
    assert entered == [1, -1] * 3
    x.sin().sum().backward()
    end()
    assert len(entered) == 6


class _Calls(TorchFunctionMode):
    """Counts the calls of torch that come from Python, ops that a dispatch mode runs aside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += not isinstance(func, torch._ops.OpOverload)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("action", ["swap", "recompute", None])
def test_a_function_mode_of_the_program_sees_the_program_alone(action: str | None) -> None:
    """Our own calls of torch in backward go past it: it counts what it counts without us."""
    x = vector()

    def step() -> Tensor:
        y = (x * 2.0).sin()
        y.mul_(1.5)
        return (y.exp() @ x.detach()).relu()

    program = compiled(step, action) if action else None  # type: ignore[arg-type]
    x.grad = None
    expected = plain(step, x)

    def counted(executor: StepExecutor | None) -> tuple[int, list[bytes]]:
        calls = _Calls()
        end = watch_backward(lambda: calls)  # around the engine, as a mode around ``backward()`` is off inside of it
        try:
            with executing(executor) if executor is not None else contextlib.nullcontext():
                step().backward()
        finally:
            end()
        return calls.num_calls, gradients((x,))

    num_calls, found = counted(None)
    assert found == expected[:-1]
    for observer in (None, observe_all((LiveBytes(CPU), Recorder(CPU)))):
        executor = executor_for(program, observer=observer)
        assert counted(executor) == (num_calls, found)
        assert not executor.has_deviated


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "pinv": torch.linalg.pinv,
    "pinv-hermitian": lambda z: torch.linalg.pinv(z @ z.mH, hermitian=True),
    "pinverse": torch.pinverse,
    "pinv-of-conjugated": lambda z: torch.linalg.pinv(z.conj()),
    "pinv-of-many": lambda z: torch.stack([torch.linalg.pinv(part) for part in z.reshape(2, 4, 2)]),
    "lstsq": lambda z: torch.linalg.lstsq(z @ z.mH + torch.eye(4), z, driver="gels").solution,
    "negated": lambda z: (z.conj().imag * 2.0 + z.real).sin() * z,
    "matrix-exp": torch.linalg.matrix_exp,
    "eig": lambda z: torch.linalg.eigvals(z),
    "fft": lambda z: torch.fft.irfft(torch.fft.fft(z.conj())).to(torch.complex128),
}


@pytest.fixture
def parts() -> Tensor:
    """Real and imaginary parts of a small complex matrix."""
    return torch.randn(4, 4, 2, dtype=torch.double).requires_grad_()


@pytest.mark.parametrize("action", [None, "swap", "recompute"])
@pytest.mark.parametrize("name", OPS)
def test_complex_ops(name: str, action: str | None, parts: Tensor) -> None:
    """Complex ops give the bits of plain PyTorch, in forward, in a backward that is watched, and in a replay."""

    def step() -> Tensor:
        made = OPS[name](torch.view_as_complex(parts * 1.5))
        again = (made * made.conj()).sin()
        return torch.view_as_real(again.resolve_conj()).sum()

    program = compiled(step, action) if action else None  # type: ignore[arg-type]
    parts.grad = None
    expected = plain(step, parts)
    for verify in (False, True):
        found, _ = planned(step, parts, program=program, verify=verify)
        assert found == expected


def test_keys_within_a_mode() -> None:
    """Within a mode the three keys are excluded for ops of real tensors, and are not for ops of complex ones."""
    keys = [torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor]
    seen: list[list[bool]] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            def note(*_args: object, **_kwargs: object) -> None:
                seen.append([torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys])

            kernel_keys.call(note, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    real, number = torch.ones(2), torch.ones(2, dtype=torch.complex64)
    with Mode():
        real.sin()
        number.sin()
        torch.cat([real, real])
        torch.cat([number, number])
        torch.where(real > 0, number, number)
        torch.add(real, real, out=torch.empty(2))
        torch.sum(number, dim=0, out=torch.empty((), dtype=torch.complex64))
    no, yes = [False] * 3, [True] * 3
    assert [keys for keys in seen if keys not in (no, yes)] == []
    assert no in seen
    assert yes in seen
    assert not any(torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in keys)


@pytest.mark.parametrize("action", [None, "swap", "recompute"])
@pytest.mark.parametrize("enabled", [False, True])
def test_bilinear_under_autocast(enabled: bool, action: str | None) -> None:
    """The ops within the kernel of ``bilinear`` autocast where, and only where, the program has autocast on."""
    layer = torch.nn.Bilinear(16, 16, 8)
    x = torch.randn(12, 16).requires_grad_()

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return layer((x * 1.5).sin(), (x * 0.5).cos()).exp().sum()

    program = compiled(step, action) if action else None  # type: ignore[arg-type]
    layer.zero_grad()
    x.grad = None
    expected = plain(step, x, layer.weight)
    layer.zero_grad()
    for verify in (False, True):
        found, _ = planned(step, x, layer.weight, program=program, verify=verify)
        layer.zero_grad()
        assert found == expected
