"""The same training through LightningCLI: every keyword of the strategy can be set from a file or a flag.

Usage:
    python -m examples.lightning.cli fit --config examples/lightning/config.yaml
    python -m examples.lightning.cli fit --config CONFIG --trainer.strategy.init_args.budget=10MiB
    python -m examples.lightning.cli fit --trainer.strategy.help=lightning_offload.OffloadStrategy
"""

from __future__ import annotations

from lightning.pytorch.cli import LightningCLI

from examples.lightning.train import Classifier, Digits


def main() -> None:
    LightningCLI(Classifier, Digits, save_config_callback=None)


if __name__ == "__main__":
    main()
