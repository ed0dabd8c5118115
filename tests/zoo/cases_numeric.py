"""Numbers of other kinds: complex values, indices, linear algebra, normalisations, low precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.zoo.case import Case
from tests.zoo.models.sandwich import WIDTH, Sandwich, body_case, rows, simple, square_loss

HALF = WIDTH // 2


def _complex(x: Tensor) -> Tensor:
    value = torch.complex(x[:, :HALF], x[:, HALF:])
    turned = value * torch.exp(1j * value.abs())
    mixed = value.conj() * turned + turned * turned
    return torch.view_as_real(mixed).flatten(1).tanh()


def _conjugates(x: Tensor) -> Tensor:
    """Conjugate and negative views of one storage; both are bits of the tensor, not of its bytes."""
    value = torch.view_as_complex(x.tanh().view(-1, HALF, 2).contiguous())
    bent = value.conj() * value.exp()
    negative = value.conj().imag
    return torch.cat([bent.real * negative, bent.imag * value.imag], 1)


def _fourier(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, dim=1)
    return torch.fft.irfft(spectrum * spectrum.conj() / 16, n=WIDTH, dim=1) + x


def _indices(x: Tensor) -> Tensor:
    ordered, order = x.sort(1)
    top, where = x.topk(16, 1)
    best = x.cummax(1).values
    spread = torch.zeros_like(x).scatter(1, where, top.sin())
    out = ordered.sigmoid() * best + spread + x.gather(1, order).cos() + x.max(1, keepdim=True).values
    return out.tanh()


def _masks(x: Tensor) -> Tensor:
    """A boolean index makes shapes depend on data."""
    chosen = x[x > 0.5]
    out = torch.where(x > 0, x.sigmoid(), x.sin()).masked_fill(x < -1, 0.1)
    return out + (chosen * chosen.sigmoid()).mean()


def _writes_by_index(x: Tensor) -> Tensor:
    rows_of = torch.arange(0, x.shape[0], 3, device=x.device)
    out = x * 1.0
    out[rows_of] = out[rows_of].sin()
    out.index_add_(0, rows_of, x[rows_of] * x[rows_of])
    return out.index_fill(1, rows_of[:5], 0.5).tanh()


def _linear_algebra(x: Tensor) -> Tensor:
    gram = x.t() @ x / x.shape[0] + torch.eye(WIDTH, device=x.device)
    factor = torch.linalg.cholesky(gram)
    solved = torch.linalg.solve_triangular(factor, x.t(), upper=False).t()
    mixed = torch.einsum("ni,ij->nj", solved, gram)
    return torch.baddbmm(x.view(8, -1, WIDTH), mixed.view(8, -1, WIDTH), gram.expand(8, -1, -1)).view_as(x).tanh()


def _reductions(x: Tensor) -> Tensor:
    total = x.cumsum(1) * 0.1 + (x.tanh() + 1.1).cumprod(1)
    softened = x.logsumexp(1, keepdim=True) + x.norm(dim=1, keepdim=True) + x.var(1, keepdim=True)
    near = torch.cdist(x[:64], x[64:128]).min(1, keepdim=True).values
    return total.tanh() * softened.square().log1p().tanh() + near.mean().tanh() + x.log_softmax(1) * x.softmax(0)


def _products(x: Tensor) -> Tensor:
    """Backward of `prod` takes another path, with other roundings, wherever a dispatch mode is active."""
    return x.tanh() * (x.sigmoid() + 0.5).view(-1, 32, 4).prod(-1).repeat(1, 4)


class _Norms(nn.Module):
    """Normalisations with and without running statistics, and weights derived by power iteration."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.cumulative = nn.BatchNorm1d(WIDTH, momentum=None)
        self.layer = nn.LayerNorm(WIDTH)
        self.root = nn.RMSNorm(WIDTH)
        self.group = nn.GroupNorm(4, WIDTH)
        self.instance = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.weighted = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Chain them all."""
        x = self.cumulative(self.batch(x).relu()) + self.root(self.layer(x))
        x = self.instance(self.group(x).view(-1, 8, 16)).flatten(1)
        out: Tensor = self.weighted(self.spectral(x).sigmoid())
        return out


class _Pooling(nn.Module):
    """Pooling, interpolation and folding, whose backward needs indices or nothing."""

    def forward(self, x: Tensor) -> Tensor:
        """Treat rows as small images."""
        image = x.view(-1, 8, 16, 16)
        small = functional.max_pool2d(image, 2) * functional.avg_pool2d(image, 2)
        small = small + functional.adaptive_max_pool2d(image, 8)
        small = small * functional.fractional_max_pool2d(image, 2, output_size=8)
        large = functional.interpolate(small, scale_factor=2.0, mode="bilinear")
        folded = functional.fold(functional.unfold(large, 3, padding=1), (16, 16), 3, padding=1)
        mixed = functional.pixel_shuffle(functional.pixel_unshuffle(folded, 2), 2)
        return (mixed * functional.pad(large, (1, 1, 1, 1), mode="reflect")[:, :, 1:-1, 1:-1]).tanh().view_as(x)


class _EvalNorm(nn.Module):
    """A BatchNorm that stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH).eval()

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the fixed statistics."""
        out: Tensor = self.norm.eval()(x.relu())
        return out.sin()


def _constants(x: Tensor) -> Tensor:
    """Scalars, empty tensors and constants made on the fly."""
    ramp = torch.arange(WIDTH, device=x.device) / WIDTH
    nothing = x[:0].exp().sum()
    return (
        x * ramp * x.mean() + torch.full_like(x, 0.3) * (x.abs() + 0.01).sqrt() + nothing + torch.tensor(0.5) * x.sin()
    )


def _half_model() -> nn.Module:
    return Sandwich(functional.gelu).to(torch.bfloat16)


def _double_model() -> nn.Module:
    return Sandwich(torch.sin, depth=2).to(torch.float64)


NUMERIC: tuple[Case, ...] = (
    body_case("complex", _complex, budgeted=True),
    body_case("conjugates", _conjugates, budgeted=True),
    body_case("fourier", _fourier, budgeted=True),
    body_case("indices", _indices, budgeted=True),
    body_case("masks", _masks, depth=2, static=False),
    body_case("writes-by-index", _writes_by_index, budgeted=True),
    body_case("linear-algebra", _linear_algebra, depth=2, budgeted=True),
    # Not budgeted: the tracker is a dispatch mode, under which the backward of prod takes other memory than without.
    body_case("reductions", _reductions, depth=2),
    body_case("products", _products),
    body_case("norms", module=_Norms, depth=2, budgeted=True),
    body_case("pooling", module=_Pooling, depth=2, budgeted=True),
    body_case("evaluation-norm", module=_EvalNorm),
    body_case("constants", _constants),
    Case(
        name="bfloat16-weights",
        build=_half_model,
        batch=lambda step: rows(step).to(torch.bfloat16),
        train_step=simple(square_loss),
    ),
    Case(
        name="double-weights",
        build=_double_model,
        batch=lambda step: rows(step).double(),
        train_step=simple(square_loss),
    ),
)
