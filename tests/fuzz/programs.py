"""Random training programs: a pool of 8x8 tensors and instructions that combine, view, write and drop them.

A program is a seed. Every decision is drawn from a generator that is seeded anew in each step, so that all steps
run the same instructions on other numbers; a program of the kind that *varies* runs other ones now and then.
Nothing that is drawn depends on the numbers in a tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

SIDE = 8


class _SaveInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.t())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * x.cos() + 0.01 * y.t()


class _SaveOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.tanh(), (x * y).sigmoid()
        ctx.save_for_backward(a, b, x, y)
        return a, b

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        a, b, x, y = ctx.saved_tensors
        k = h * b * (1 - b)
        return g * (1 - a * a) + k * y, k * x


class _WriteInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(0.5).tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (1 - x * x) * 0.5


class Net(nn.Module):
    """The parameters and buffers that programs use."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(SIDE, SIDE) * 0.3) for _ in range(3)])
        self.bias = nn.Parameter(torch.randn(SIDE) * 0.1)
        self.norm = nn.BatchNorm1d(SIDE)
        self.norm_eval = nn.BatchNorm1d(SIDE).eval()
        self.conv = nn.Conv2d(1, 1, 3, padding=1)
        self.layer_norm = nn.LayerNorm(SIDE)
        self.register_buffer("running", torch.zeros(SIDE, SIDE))
        self.running: Tensor


class Machine:
    """Runs one step of a program.

    Args:
        net: Parameters and buffers.
        key: Seeds every decision. Each instruction has its own generator, so that leaving some of them out
            (``skipped``, to find the smallest program that fails) does not change the others.
        writes: How often, from 0 to 1, a write in place is drawn instead of another instruction.
        sneaks: Whether it writes values unseen by version counters now and then, between instructions.
    """

    skipped: ClassVar[set[int]] = set()

    def __init__(self, net: Net, key: str, writes: float, *, sneaks: bool = False) -> None:
        self.net = net
        self.sneaks = sneaks
        self.key = key
        self.writes = writes
        self.rng = random.Random(key)
        self.pool: list[Tensor] = []
        self.kept: list[Any] = []
        self.log: list[str] = []

    def any(self) -> Tensor:
        """One of the last values, sometimes an old one."""
        recent = self.pool[-4:] if self.rng.random() < 0.7 else self.pool
        return self.rng.choice(recent)

    def weight(self) -> Tensor:
        return self.rng.choice(list(self.net.weights))

    def run(self, x: Tensor, num_instructions: int) -> Tensor:
        """Run the instructions; the loss."""
        self.pool = [x, x * 0.5 + self.net.bias]
        for i in range(num_instructions):
            if i not in self.skipped:
                self.rng = random.Random(f"{self.key} {i}")
                self._run_one()
        terms = [t.float().sum() for t in self.pool[-4:]]
        return torch.stack(terms).sum() * 0.1 + self.net.bias.sum() * 0

    def _run_one(self) -> None:
        instruction = self.rng.choice(_WRITES if self.rng.random() < self.writes else _PURE)
        self.log.append(instruction.__name__)
        drop, dropped = self.rng.random() < 0.35, self.rng.random()
        out = instruction(self)
        self.pool.extend(t for t in (out if isinstance(out, (tuple, list)) else (out,)) if t is not None)
        if self.sneaks and self.rng.random() < 0.15:
            self.any().data.mul_(0.9)
        if drop and len(self.pool) > 3:
            del self.pool[int(dropped * (len(self.pool) - 1))]
        if self.rng.random() < 0.04:
            self._give_other_memory()

    def _give_other_memory(self) -> None:
        """Have a parameter lie elsewhere: where it was saved itself, backward reads what it then is.

        One that no instruction writes past ``.data``: its counter would tell of writes to the memory that it has left.
        """
        tensor = self.rng.choice([self.weight(), self.net.conv.weight, self.net.layer_norm.weight])
        tensor.data = tensor.data * 0.95


Instruction = Callable[[Machine], Any]
_PURE: list[Instruction] = []
_WRITES: list[Instruction] = []


def _pure(function: Instruction) -> Instruction:
    _PURE.append(function)
    return function


def _write(function: Instruction) -> Instruction:
    _WRITES.append(function)
    return function


@_pure
def _matmul(m: Machine) -> Tensor:
    return m.any() @ m.weight() * 0.5


@_pure
def _matmul_transposed(m: Machine) -> Tensor:
    return F.linear(m.any(), m.weight(), m.net.bias)


@_pure
def _matmul_values(m: Machine) -> Tensor:
    return m.any() @ m.any().t() * 0.1


@_pure
def _unary(m: Machine) -> Tensor:
    known = [torch.sin, torch.tanh, torch.sigmoid, F.relu, F.gelu, F.silu, torch.abs, F.softplus, torch.neg]
    return m.rng.choice([*known, lambda t: t.exp().clamp(max=3.0)])(m.any())


@_pure
def _scalar(m: Machine) -> Tensor:
    return m.rng.choice([lambda t: t * 1.5, lambda t: t + 1, lambda t: 2 - t, lambda t: t / 3, lambda t: t**2])(m.any())


@_pure
def _binary(m: Machine) -> Tensor:
    return m.rng.choice([torch.add, torch.mul, torch.sub, torch.maximum, torch.atan2])(m.any(), m.any())


@_pure
def _square(m: Machine) -> Tensor:
    x = m.any()
    return x * x


@_pure
def _zero_dim(m: Machine) -> Tensor:
    return m.any() * torch.tensor(1.25) + m.any().mean()


@_pure
def _with_buffer(m: Machine) -> Tensor:
    return (m.any() + m.net.running).sin()


@_pure
def _with_bias(m: Machine) -> Tensor:
    return (m.any() + m.net.bias).cos()


@_pure
def _parameter_only(m: Machine) -> Tensor:
    return (m.weight() * 2 + m.net.bias).tanh()


@_pure
def _transpose(m: Machine) -> Tensor:
    return m.any().t()


@_pure
def _views(m: Machine) -> Tensor:
    x = m.any()
    return m.rng.choice(
        [
            lambda: x[:4].repeat(2, 1),
            lambda: x[:, ::2].reshape(4, 8).expand(2, 4, 8).reshape(8, 8),
            lambda: x.as_strided((8, 8), (1, 8)) if x.is_contiguous() else x,
            lambda: x[2:3].expand(8, 8),
            lambda: x.view(8, 8) if x.is_contiguous() else x.reshape(8, 8),
            lambda: x.unsqueeze(0).squeeze(0),
            lambda: x.diagonal().unsqueeze(1).expand(8, 8),
            lambda: x.flip(0),
            lambda: x[[3, 1, 2, 2, 0, 5, 7, 6]],
            lambda: torch.roll(x, 1, 0),
        ]
    )()


@_pure
def _slice_product(m: Machine) -> Tensor:
    x = m.any()
    return torch.cat([x[:4] * x[4:], x[2:6].sin()])


@_pure
def _split_stack(m: Machine) -> Tensor:
    a, b = m.any().split(4)
    return torch.stack([a.sin(), b * a]).reshape(8, 8)


@_pure
def _chunk(m: Machine) -> Tensor:
    a, b = m.any().chunk(2, 1)
    return torch.cat([a.sigmoid() * b.tanh(), a], 1)


@_pure
def _unbind(m: Machine) -> Tensor:
    return torch.stack([row * (i + 1) for i, row in enumerate(m.any().unbind(0))])


@_pure
def _index(m: Machine) -> Tensor:
    x = m.any()
    i = torch.arange(8).flip(0)
    return m.rng.choice([lambda: x[i], lambda: x.gather(0, i.expand(8, 8)), lambda: x.index_select(1, i)])()


@_pure
def _where(m: Machine) -> Tensor:
    x = m.any()
    return torch.where(x > 0, x, m.any()).masked_fill(x < -1, 0.5)


@_pure
def _softmax(m: Machine) -> Tensor:
    return m.rng.choice([lambda t: t.softmax(1), lambda t: t.log_softmax(0), lambda t: t.cumsum(0)])(m.any())


@_pure
def _reduction(m: Machine) -> Tensor:
    x = m.any()
    f = m.rng.choice(
        [
            lambda: x.sum(0, keepdim=True),
            lambda: x.mean(1, keepdim=True),
            lambda: x.amax(0, keepdim=True),
            lambda: x.norm(dim=1, keepdim=True),
            lambda: x.var(0, keepdim=True),
            lambda: x.prod(1, keepdim=True).clamp(-2, 2),
            lambda: x.max(1, keepdim=True)[0],
            lambda: x.logsumexp(0, keepdim=True),
        ]
    )
    return f().expand(8, 8)


@_pure
def _sort(m: Machine) -> Tensor:
    values, _ = m.any().sort(1)
    return values


@_pure
def _dropout(m: Machine) -> Tensor:
    return F.dropout(m.any(), 0.3)


@_pure
def _noise(m: Machine) -> Tensor:
    x = m.any()
    return m.rng.choice(
        [
            lambda: x * torch.rand(8, 8) + torch.randn_like(x),
            lambda: x + torch.empty(8, 8).uniform_(),
            lambda: x * torch.bernoulli(torch.full((8, 8), 0.5)),
            lambda: x[torch.randperm(8)],
            lambda: F.rrelu(x, training=True),
            lambda: F.gumbel_softmax(x),
            lambda: torch.normal(x, 0.1),
        ]
    )()


@_pure
def _batch_norm(m: Machine) -> Tensor:
    return m.net.norm(m.any())


@_pure
def _batch_norm_eval(m: Machine) -> Tensor:
    return m.net.norm_eval(m.any())


@_pure
def _layer_norm(m: Machine) -> Tensor:
    return m.net.layer_norm(m.any())


@_pure
def _conv(m: Machine) -> Tensor:
    return m.net.conv(m.any().reshape(1, 1, 8, 8)).reshape(8, 8)


@_pure
def _conv_channels_last(m: Machine) -> Tensor:
    x = m.any().reshape(1, 1, 8, 8).contiguous(memory_format=torch.channels_last)
    return F.max_pool2d(m.net.conv(x), 3, 1, 1)[0, 0]


@_pure
def _casts(m: Machine) -> Tensor:
    x = m.any()
    return (x.double() * 1.1).sin().float() + x.bfloat16().tanh().float()


@_pure
def _autocast(m: Machine) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (m.any() @ m.weight()).sin().float()


@_pure
def _complex(m: Machine) -> Tensor:
    z = torch.complex(m.any().contiguous(), m.any().contiguous())
    return (z.conj() * z.t()).real + z.conj().imag * 0.5


@_pure
def _foreach(m: Machine) -> list[Tensor]:
    a, b = torch._foreach_mul([m.any(), m.any()], 1.1)
    return list(torch._foreach_tanh([a, b]))


@_pure
def _save_input(m: Machine) -> Tensor:
    return _SaveInput.apply(m.any())


@_pure
def _save_output(m: Machine) -> tuple[Tensor, Tensor]:
    return _SaveOutput.apply(m.any(), m.any())


@_pure
def _checkpointed(m: Machine) -> Tensor:
    weight = m.weight()
    reentrant = m.rng.random() < 0.5
    x = m.any()
    if not x.requires_grad:
        x = x + m.net.bias
    return checkpoint(lambda t: F.dropout((t @ weight).sin(), 0.2), x, use_reentrant=reentrant)


@_pure
def _own_hooks(m: Machine) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m.any().sin() * m.any()


@_pure
def _detached(m: Machine) -> Tensor:
    return m.any().detach().sin() * m.weight()


@_pure
def _no_grad(m: Machine) -> Tensor:
    with torch.no_grad():
        mask = (m.any() * 2).sigmoid()
    return mask * m.any()


@_pure
def _hooked(m: Machine) -> Tensor:
    y = m.any() * 1.0
    if y.requires_grad:
        y.register_hook(lambda g: None if g is None else g * 1.5)
    return y


@_pure
def _inner_grad(m: Machine) -> Tensor:
    x = m.any()
    if not x.requires_grad:
        return x * 2
    (g,) = torch.autograd.grad((x.sin() * x).sum(), x, create_graph=m.rng.random() < 0.5)
    return g


@_pure
def _keep_alive(m: Machine) -> None:
    m.kept.append(m.any())


@_pure
def _attention(m: Machine) -> Tensor:
    x = m.any().reshape(1, 1, 8, 8)
    return F.scaled_dot_product_attention(x, m.any().reshape(1, 1, 8, 8), x).reshape(8, 8)


@_pure
def _vmapped(m: Machine) -> Tensor:
    return torch.func.vmap(lambda row: row.sin() * row.sum())(m.any())


@_write
def _fresh_chain(m: Machine) -> Tensor:
    y = m.any() + m.any()
    for _ in range(m.rng.randrange(1, 4)):
        f = m.rng.choice([Tensor.relu_, Tensor.sigmoid_, lambda t: t.mul_(1.1), lambda t: t.add_(m.net.bias)])
        f(y)
    return y


@_write
def _write_view(m: Machine) -> Tensor:
    y = m.any() * 1.5
    view = m.rng.choice([lambda: y[2:4], lambda: y.t(), lambda: y[:, ::3], lambda: y.diagonal()])()
    m.rng.choice([lambda: view.mul_(2.0), lambda: view.zero_(), lambda: view.add_(1.0), lambda: view.tanh_()])()
    return y


@_write
def _write_value(m: Machine) -> None:
    m.rng.choice(
        [
            lambda t: t.mul_(1.1),
            lambda t: t.mul_(m.any().detach().tanh()),
            lambda t: t.add_(0.1),
            lambda t: t[1:3].zero_(),
            lambda t: t.t()[2].add_(0.25),
            lambda t: t.masked_fill_(t.detach() > 0, 0.125),
        ]
    )(m.any())


@_write
def _write_no_grad(m: Machine) -> None:
    with torch.no_grad():
        m.any().mul_(0.9)


@_write
def _write_data(m: Machine) -> None:
    m.any().data.mul_(0.9)


@_write
def _write_detached(m: Machine) -> None:
    m.any().detach().add_(0.01)


@_write
def _write_sibling(m: Machine) -> Tensor:
    y = m.any() * 1.25
    a, b = m.rng.choice([torch.unsafe_chunk, lambda t, n: torch.unsafe_split(t, 4)])(y, 2)
    c = b.sin()
    a.mul_(2.0)
    return torch.cat([a.cos(), c])


@_write
def _setitem(m: Machine) -> Tensor:
    y = m.any().clone()
    y[m.rng.randrange(8)] = m.any()[0]
    y[:, 2] *= 2
    y[y > 1.5] = 0.25
    return y


@_write
def _index_write(m: Machine) -> Tensor:
    y = m.any() * 1.0
    return y.index_add_(0, torch.tensor([1, 3]), m.any()[:2]).scatter_(0, torch.zeros(1, 8, dtype=torch.long), 0.5)


@_write
def _foreach_write(m: Machine) -> list[Tensor]:
    a, b = m.any() + 1, m.any() + 2
    torch._foreach_add_([a, b], [b.detach(), a.detach()])
    torch._foreach_mul_([a[:2], b[3:]], 1.1)
    return [a, b]


@_write
def _dropout_write(m: Machine) -> Tensor:
    return F.dropout(m.any() + 0.0, 0.3, inplace=True)


@_write
def _function_write(m: Machine) -> Tensor:
    return _WriteInput.apply(m.any() * 1.0)


@_write
def _update_buffer(m: Machine) -> None:
    with torch.no_grad():
        m.net.running.mul_(0.9).add_(m.any().detach() * 0.1)


@_write
def _out_argument(m: Machine) -> Tensor:
    with torch.no_grad():
        out = torch.zeros(8, 8)
        torch.add(m.any(), 1.0, out=out)
        torch.mul(out, 2.0, out=out)
    return out * m.any()


@_write
def _copy_write(m: Machine) -> Tensor:
    y = torch.zeros(8, 8)
    y[:4].copy_(m.any()[4:])
    y[4:] = m.any()[:4].sin()
    return y


@_write
def _update_bias(m: Machine) -> None:
    with torch.no_grad():
        m.net.bias.mul_(0.99)


@_write
def _update_weight_data(m: Machine) -> None:
    m.weight().data.mul_(0.99)
