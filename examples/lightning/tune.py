"""Find the efficient batch size of the network of `train.py`, with its learning rate, and train with both.

Usage: python -m examples.lightning.tune --budget 64MiB --plot-dir plots

The finder times a few sizes before the training begins and shows them in a table. Without --budget the run uses no
memory plan. The training that follows is the one that the found values would have given from the start, but that a
raised learning rate is warmed up.
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl

import lightning_offload
from examples.lightning.train import Classifier, Digits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", help='such as "64MiB"; by default there is no memory plan')
    parser.add_argument("--batch-size", type=int, default=32, help="the one that the learning rate is for")
    parser.add_argument("--max-batch-size", type=int, help="by default a tenth of the data set")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plot-dir", help="where the plots of the trials go")
    arguments = parser.parse_args()

    pl.seed_everything(0)
    finder = lightning_offload.EfficientBatchSizeFinder(
        max_val=arguments.max_batch_size, plot_dir=arguments.plot_dir, objective="throughput"
    )
    strategy = lightning_offload.OffloadStrategy(budget=arguments.budget) if arguments.budget else "auto"
    trainer = pl.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=arguments.epochs, callbacks=[finder],
        logger=False, enable_checkpointing=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Classifier(), datamodule=Digits(batch_size=arguments.batch_size))


if __name__ == "__main__":
    main()
