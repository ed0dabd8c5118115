"""Random ops: dropout in its variants, rrelu, generators of one's own, sampling."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.case import Case
from tests.zoo.models.sandwich import WIDTH, body_case


def _dropout(x: Tensor) -> Tensor:
    return functional.dropout(functional.dropout(x.relu(), 0.2), 0.1)


def _dropout_inplace(x: Tensor) -> Tensor:
    return functional.dropout(x * 1.5, 0.3, inplace=True).sin()


def _dropout_variants(x: Tensor) -> Tensor:
    x = functional.alpha_dropout(functional.selu(x), 0.1, training=True)
    image = x.view(-1, 8, 4, 4)
    image = functional.dropout2d(image, 0.2) + functional.feature_alpha_dropout(image, 0.2, training=True)
    return functional.dropout1d(image.flatten(2), 0.1).reshape(x.shape)


def _rrelu(x: Tensor) -> Tensor:
    return functional.rrelu(x, 0.1, 0.4, training=True) * 1.5


def _rrelu_inplace(x: Tensor) -> Tensor:
    return functional.rrelu_(x * 2.0, 0.1, 0.4, training=True).sin()


def _reparametrised(x: Tensor) -> Tensor:
    mean, spread = x.chunk(2, 1)
    noise = torch.randn_like(spread)
    scale = functional.softplus(spread)
    sample = mean + scale * noise
    gate = torch.empty_like(sample).uniform_(0.5, 1.5)
    return torch.cat([sample * gate, sample.tanh() * torch.rand_like(sample)], 1)


def _sampled(x: Tensor) -> Tensor:
    chosen = torch.multinomial(x.detach().softmax(1), 8, replacement=True)
    picked = x.gather(1, chosen).mean(1, keepdim=True)
    soft = functional.gumbel_softmax(x, tau=0.8)
    hard = functional.gumbel_softmax(x, hard=True)
    order = torch.randperm(WIDTH, device=x.device)
    return (soft + hard) * x[:, order].tanh() + picked.tanh()


class _OwnGenerator(nn.Module):
    """Noise from a generator of one's own, beside the global one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(7)

    def _generator(self, x: Tensor) -> torch.Generator:
        if self.generator.device != x.device:
            self.generator = torch.Generator(x.device).manual_seed(7)
        return self.generator

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with masks and noise from both generators."""
        own = self._generator(x)
        mask = torch.bernoulli(torch.full_like(x, 0.8), generator=own)
        noise = torch.rand(x.shape, generator=own, device=x.device) + torch.rand_like(x)
        smooth = torch.empty_like(x).normal_(generator=own)
        return (x * mask).sin() * noise + (x + smooth).exp().clamp(max=4.0)

    def get_extra_state(self) -> Tensor:
        """The generator's state, which makes it part of the outcome of a run."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the generator."""
        self.generator.set_state(state)


class _Attention(nn.Module):
    """`nn.MultiheadAttention` and an encoder layer, both with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within groups of 48 rows."""
        groups = x.view(-1, 48, WIDTH)
        mixed, _ = self.attention(groups, groups, groups)
        out: Tensor = self.layer(groups + mixed)
        return out.reshape(x.shape)


RANDOM: tuple[Case, ...] = (
    body_case("dropout", _dropout, budgeted=True),
    body_case("dropout-inplace", _dropout_inplace, budgeted=True),
    body_case("dropout-variants", _dropout_variants, budgeted=True),
    body_case("rrelu", _rrelu, budgeted=True),
    body_case("rrelu-inplace", _rrelu_inplace, budgeted=True),
    body_case("reparametrised", _reparametrised, budgeted=True),
    body_case("sampled", _sampled, budgeted=True),
    body_case("own-generator", module=_OwnGenerator, budgeted=True),
    body_case("attention-dropout", module=_Attention, depth=1, budgeted=True),
)
