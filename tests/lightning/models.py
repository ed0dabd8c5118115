"""Small LightningModules, and the complete state that a fit of one leaves behind."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 6


def images(num_batches: int = NUM_STEPS, batch_size: int = 4) -> DataLoader[Any]:
    """Random images of 3x12x12 with labels, the same ones at every call."""
    generator = torch.Generator().manual_seed(7)
    num_images = num_batches * batch_size
    data = TensorDataset(
        torch.randn(num_images, 3, 12, 12, generator=generator),
        torch.randint(0, 4, (num_images,), generator=generator),
    )
    return DataLoader(data, batch_size)


class ConvNet(pl.LightningModule):
    """Convolutions, BatchNorm, an in-place ReLU, a residual sum and dropout, trained automatically."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.inner = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.head = nn.Sequential(nn.Dropout(0.3), nn.Flatten(), nn.Linear(16 * 144, 4))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        return self.head(x + self.inner(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]).float(), batch[1])
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Gan(pl.LightningModule):
    """Two optimizers and three backwards per step, trained manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 3 * 144), nn.Tanh()
        )
        self.critic = nn.Sequential(nn.Linear(3 * 144, 32), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(32, 1))
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        real = batch[0].flatten(1)
        generator_optimizer, critic_optimizer = self.optimizers()
        fake = self.generator(torch.randn(len(real), 8, dtype=real.dtype))

        critic_optimizer.zero_grad()
        on_real = nn.functional.softplus(-self.critic(real)).mean()
        self.manual_backward(on_real)
        on_fake = nn.functional.softplus(self.critic(fake.detach())).mean()
        self.manual_backward(on_fake)
        critic_optimizer.step()

        self.toggle_optimizer(generator_optimizer)
        generator_optimizer.zero_grad()
        deceit = nn.functional.softplus(-self.critic(fake)).mean()
        self.manual_backward(deceit)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)
        self.losses += [x.detach().clone() for x in (on_real, on_fake, deceit)]

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.critic(batch[0].flatten(1))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(net.parameters(), lr=1e-3) for net in (self.generator, self.critic)]


def fit_and_read(trainer: pl.Trainer, module: pl.LightningModule, **fit_kwargs: Any) -> dict[str, Any]:
    """Fits `module` on `images()` and returns losses, weights, buffers, optimizer state and RNG state."""
    optimizers: list[dict[str, Any]] = []

    class ReadOptimizers(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            optimizers.extend(optimizer.state_dict() for optimizer in trainer.optimizers)

    reader = ReadOptimizers()
    trainer.callbacks.append(reader)
    trainer.fit(module, images(), images(2), **fit_kwargs)
    trainer.callbacks.remove(reader)
    return {
        "losses": module.losses,
        "weights": module.state_dict(),
        "optimizers": optimizers,
        "rng": torch.get_rng_state(),
    }


def assert_same(ours: Any, plain: Any, path: str = "") -> None:
    """Fails unless the two states are equal bit for bit."""
    if isinstance(plain, Tensor):
        assert ours.dtype == plain.dtype, f"{path}: {ours.dtype} instead of {plain.dtype}"
        same = ours.contiguous().view(-1).view(torch.uint8).equal(plain.contiguous().view(-1).view(torch.uint8))
        assert same, f"{path} differs"
    elif isinstance(plain, dict):
        assert ours.keys() == plain.keys(), path
        for key, value in plain.items():
            assert_same(ours[key], value, f"{path}.{key}")
    elif isinstance(plain, (list, tuple)):
        assert len(ours) == len(plain), path
        for index, value in enumerate(plain):
            assert_same(ours[index], value, f"{path}[{index}]")
    else:
        assert ours == plain, f"{path}: {ours!r} instead of {plain!r}"
