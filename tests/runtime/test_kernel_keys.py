"""Kernels that call other ops on conjugated or negated views of their own give what they give without a mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_offload.runtime import kernel_keys
from tests.runtime.executing import compiled, plain, planned

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
def leaf() -> Tensor:
    """Real and imaginary parts of a small complex matrix."""
    return torch.randn(4, 4, 2, dtype=torch.double).requires_grad_()


@pytest.mark.parametrize("action", [None, "swap", "recompute"])
@pytest.mark.parametrize("name", OPS)
def test_complex_ops(name: str, action: str | None, leaf: Tensor) -> None:
    """Complex ops give the bits of plain PyTorch, in forward, in a backward that is watched, and in a replay."""

    def step() -> Tensor:
        made = OPS[name](torch.view_as_complex(leaf * 1.5))
        again = (made * made.conj()).sin()
        return torch.view_as_real(again.resolve_conj()).sum()

    program = compiled(step, action) if action else None  # type: ignore[arg-type]
    leaf.grad = None
    expected = plain(step, leaf)
    for verify in (False, True):
        found, _ = planned(step, leaf, program=program, verify=verify)
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
