"""Diffusers' UNet2D in an Accelerate loop with averaged weights, as its examples train it."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from accelerate import Accelerator
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_offload.accelerate import prepare_offload

_NUM_STEPS = 40


def train(budget: str | None, folder: Path) -> nn.Module:
    """Train to take noise out of pictures."""
    model = UNet2DModel(
        sample_size=16,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(32, 64),
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    accelerator = Accelerator(cpu=True)
    averaged = EMAModel(model.parameters(), decay=0.99)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=_NUM_STEPS)
    loader = DataLoader(torch.randn(8 * _NUM_STEPS, 3, 16, 16), batch_size=8, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with contextlib.nullcontext() if budget is None else prepare_offload(accelerator, model, budget=budget):
        for clean in loader:
            noise = torch.randn_like(clean)
            timesteps = torch.randint(0, 100, (len(clean),))
            noisy = noise_scheduler.add_noise(clean, noise, timesteps)
            with accelerator.accumulate(model):
                predicted = model(noisy, timesteps, return_dict=False)[0]
                accelerator.backward(nn.functional.mse_loss(predicted, noise))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            averaged.step(model.parameters())
    return accelerator.unwrap_model(model)
