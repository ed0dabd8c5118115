"""Storages: in-place writes, views, slices, expands, and writes that autograd does not see."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case
from tests.zoo.models.sandwich import WIDTH, body_case

HALF = WIDTH // 2


def _inplace_residual(x: Tensor) -> Tensor:
    out = x.sigmoid() * 1.5
    out += x
    return out.relu_()


def _inplace_activations(x: Tensor) -> Tensor:
    out = functional.leaky_relu_(x * 2.0, 0.1)
    out = functional.elu_(out + x, 0.7)
    out = functional.hardtanh_(out * 1.1, -2.0, 2.0)
    return torch.tanh_(out + 0.1) * functional.relu_(out * 1.5)


def _inplace_views(x: Tensor) -> Tensor:
    out = x * 1.0
    out[:, :HALF].mul_(0.5)
    out[:, ::2] += 0.25
    out.view(-1)[: out.numel() // 2].add_(1.0)
    out.t()[3:5].zero_()
    return out.sin()


def _slice_writes(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :HALF] = x[:, HALF:].exp().clamp(max=3.0)
    out[:, HALF:] = x[:, :HALF].sin()
    out[5:9] = 0.5
    return out * out.tanh()


def _slice_of_storage(x: Tensor) -> Tensor:
    """Two tensors fill one storage through slices; both slices are saved, at offsets, after the writes."""
    with torch.no_grad():
        room = x.new_empty(2 * x.numel())
        low = room[: x.numel()].view_as(x)
        high = room[x.numel() :].view_as(x)
        low.copy_(x).mul_(0.5)
        high.copy_(x).sin_()
    return x * low + x.cos() * high


def _foreach(x: Tensor) -> Tensor:
    parts = [x[:, :HALF] * 1.0, x[:, HALF:] * 2.0]
    torch._foreach_add_(parts, 0.5)
    torch._foreach_mul_(parts, [1.5, 0.5])
    parts = torch._foreach_add(torch._foreach_exp(torch._foreach_neg(parts)), parts, alpha=0.1)
    return torch.cat(list(parts), 1).sigmoid()


def _views_of_one(x: Tensor) -> Tensor:
    a = torch.tanh(x)
    gram = a.t() @ a / a.shape[0]
    mixed = a @ gram
    top = a[: a.shape[0] // 2]
    top = top * top.flip(0)
    spread = a.mean(0, keepdim=True).expand_as(a)
    out = mixed * spread + a.unflatten(1, (2, -1)).transpose(1, 2).flatten(1) * a
    return out + torch.cat([top, top * a[-top.shape[0] :]])


def _strided(x: Tensor) -> Tensor:
    a = x.exp().clamp(max=4.0)
    even, odd = a[:, ::2], a[:, 1::2]
    windows = a.unfold(1, 4, 2)
    diagonal = a.as_strided((a.shape[0] - WIDTH, WIDTH), (WIDTH, WIDTH + 1))
    out = torch.cat([even * odd, even / (odd + 1)], 1)
    return torch.tanh(out * windows.sin().mean(-1).mean(1, keepdim=True) + diagonal.sin().mean())


def _expanded(x: Tensor) -> Tensor:
    row = x.mean(0).sigmoid()
    wide = row.expand(x.shape[0], -1)
    column = x.std(1, keepdim=True).expand(-1, WIDTH)
    return x * wide * column + wide.exp() * wide


def _split_stack(x: Tensor) -> Tensor:
    first, second, third = x.split([32, 64, 32], 1)
    parts = torch.stack([first.sin(), third.cos(), first * third]).unbind(0)
    return torch.cat([parts[0] * parts[1], second.square(), parts[2]], 1)


def _overwritten_input(x: Tensor) -> Tensor:
    """What a recomputation of `scaled` needs is overwritten; plain backward does not need it."""
    base = x.detach() * 0.5
    scaled = base * 2.0
    out = (x + scaled).sin() * scaled.exp().clamp(max=3.0)
    base.zero_()
    return out


def _overwritten_data(x: Tensor) -> Tensor:
    """As `_overwritten_input`, written through `.data` and `detach()`, without a trace in autograd."""
    base = x * 0.5
    scaled = base * 2.0
    out = scaled.sin() * 2.0
    base.data.fill_(7.0)
    shifted = x + 1.0
    wave = (shifted + 1.0).cos()
    shifted.detach().zero_()
    return out + wave


def _data_after_pack(x: Tensor) -> Tensor:
    """A saved tensor is written through `.data`: plain backward reads what is there then."""
    scaled = x * 1.5
    out = scaled.sin()
    scaled.data.mul_(0.5)
    return out


class _RunningBuffers(nn.Module):
    """Buffers that forward overwrites after they took part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Centre by the running mean of earlier steps, then update it in place and through `out=`."""
        assert isinstance(self.mean, Tensor)
        assert isinstance(self.count, Tensor)
        assert isinstance(self.scratch, Tensor)
        out = (x - self.mean).sin() * (1.0 + self.mean)
        with torch.no_grad():
            torch.mul(x.mean(0), 0.1, out=self.scratch)
            self.mean = self.mean * 0.9 + self.scratch
            self.count += 1
        return out * 1.5


class _RunningInPlace(nn.Module):
    """A buffer that forward updates in place although a recomputation would need the old value."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Shift by the running mean, which autograd does not save, and update it in place."""
        assert isinstance(self.shift, Tensor)
        out = (x + self.shift).sin()
        with torch.no_grad():
            self.shift.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return out.exp()


class _BiasMovesInStep(nn.Module):
    """`(x + bias).sin()` with the bias moved right after its use, before backward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Add the bias, then move it."""
        out = (x + self.bias).sin()
        with torch.no_grad():
            self.bias.add_(0.05)
        return out


STORAGE: tuple[Case, ...] = (
    body_case("inplace-residual", _inplace_residual, budgeted=True),
    body_case("inplace-activations", _inplace_activations, budgeted=True),
    body_case("inplace-views", _inplace_views, budgeted=True),
    body_case("slice-writes", _slice_writes, budgeted=True),
    body_case("slice-of-storage", _slice_of_storage, budgeted=True),
    body_case("foreach", _foreach, budgeted=True),
    body_case("views-of-one-storage", _views_of_one, budgeted=True),
    body_case("strided", _strided, budgeted=True),
    body_case("expanded", _expanded, budgeted=True),
    body_case("split-stack", _split_stack, budgeted=True),
    body_case("overwritten-input", _overwritten_input),
    body_case("overwritten-data", _overwritten_data),
    body_case("data-after-pack", _data_after_pack),
    body_case("running-buffers", module=_RunningBuffers, depth=1),
    body_case("running-buffer-in-place", module=_RunningInPlace),
    body_case("bias-moves-in-step", module=_BiasMovesInStep),
)
