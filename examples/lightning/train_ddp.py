"""Train the digits on several devices, each within its own memory budget.

Usage:
    python -m examples.lightning.train_ddp --devices 2 --budget 6MiB
    torchrun --nproc-per-node=2 -m examples.lightning.train_ddp --devices 2 --budget 6MiB

Each process plans its own steps. Under torchrun `strategy="offload"` means the same strategy.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl

import lightning_offload
from examples.lightning.train import Classifier, Digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--budget", default="6MiB", help="peak memory of a training step on each device")
    parser.add_argument("--accumulate", type=int, default=1, help="batches between two updates")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    pl.seed_everything(0)
    strategy = lightning_offload.DDPOffloadStrategy(budget=args.budget)  # and DDPStrategy's own: static_graph=True, ...
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=args.accelerator,
        devices=args.devices,
        accumulate_grad_batches=args.accumulate,
        max_epochs=args.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), Digits(batch_size=64))
    if trainer.is_global_zero:
        print(f"validation accuracy: {trainer.callback_metrics['val_accuracy']:.3f}")
        print(strategy.memory.report())


if __name__ == "__main__":
    main()
