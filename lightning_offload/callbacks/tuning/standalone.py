"""A tuning without a training: a fit that ends as soon as the tuning is done, of which nothing else remains."""

from __future__ import annotations

from typing import Any

from lightning_offload.plugins.random_states import RandomStates

__all__ = ["tuned_alone"]


def tuned_alone(finder: Any, trainer: Any, model: Any, *, datamodule: Any, train_dataloaders: Any) -> None:
    """Run `finder` on the start of a fit.

    Args:
        finder: An `EfficientBatchSizeFinder`.
        trainer: Its callbacks are left out but for the finder and the progress bar.
        model: The model.
        datamodule: Its data, or None.
        train_dataloaders: Dataloaders in its place.
    """
    states = RandomStates.now()
    callbacks, loggers = trainer.callbacks, trainer.loggers
    progress_bar = trainer.progress_bar_callback
    trainer.callbacks = [finder, *([progress_bar] if progress_bar is not None else [])]
    trainer.loggers = []
    finder._early_exit = True
    try:
        trainer.fit(model, train_dataloaders, datamodule=datamodule)
    finally:
        finder._early_exit = False
        trainer.callbacks, trainer.loggers = callbacks, loggers
        states.restore()
