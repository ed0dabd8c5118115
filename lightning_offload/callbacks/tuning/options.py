"""The keywords of a finder, checked; and errors that are Lightning's own kind too."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import current_package, import_from, package_of
from lightning_offload.tuning.learning_rate import check_scaling
from lightning_offload.tuning.noise_scale import MIN_STEPS

OBJECTIVES = ("auto", "keep_effective_batch", "goodput", "throughput")
ON_FAILURE = ("keep", "raise")

__all__ = ["OBJECTIVES", "ON_FAILURE", "FinderOptions", "checked_folder", "misconfiguration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinderOptions:
    """What the user asked for; see `EfficientBatchSizeFinder`.

    Raises:
        TuningError: A value is not possible.
    """

    batch_arg_name: str
    lr_arg_name: str | None
    init_val: int | None
    min_val: int
    max_val: int | None
    steps_per_trial: int
    warmup_steps: int
    tolerance: float
    lr_scaling: str
    base_batch_size: int | None
    make_batch: Callable[[int], Any] | None
    max_seconds: float | None
    lr_warmup_epochs: int
    lr_warmup_steps: int | None
    max_lr_factor: float | None
    max_data_share: float
    min_confidence: float
    min_efficiency: float
    objective: str
    multiple_of: int
    max_trials: int | None
    pilot_steps: int
    provoke_oom: bool | None
    on_failure: str

    def __post_init__(self) -> None:
        check_scaling(self.lr_scaling)
        _check_name("batch_arg_name", self.batch_arg_name, is_optional=False)
        _check_name("lr_arg_name", self.lr_arg_name, is_optional=True)
        for name in ("init_val", "max_val", "base_batch_size", "max_trials"):
            _check_count(name, getattr(self, name), least=1, is_optional=True)
        for name in ("min_val", "steps_per_trial", "multiple_of"):
            _check_count(name, getattr(self, name), least=1, is_optional=False)
        _check_count("pilot_steps", self.pilot_steps, least=MIN_STEPS, is_optional=False)
        if not isinstance(self.objective, str) or self.objective not in OBJECTIVES:
            names = ", ".join(map(repr, OBJECTIVES))
            raise TuningError(f"unknown objective {self.objective!r}: choose one of {names}")
        if not isinstance(self.on_failure, str) or self.on_failure not in ON_FAILURE:
            raise TuningError(f"on_failure={self.on_failure!r} is not known: choose 'keep' or 'raise'")
        for name in ("warmup_steps", "lr_warmup_epochs", "lr_warmup_steps"):
            _check_count(name, getattr(self, name), least=0, is_optional=name == "lr_warmup_steps")
        if self.lr_warmup_steps and self.lr_warmup_epochs:
            raise TuningError(
                f"lr_warmup_steps={self.lr_warmup_steps} and lr_warmup_epochs={self.lr_warmup_epochs} are lengths of"
                " one warm-up: give one of them"
            )
        self._check_limits()
        if not _is_number(self.tolerance) or not 0 < self.tolerance < 1:
            raise TuningError(
                f"tolerance={self.tolerance!r} is not possible: give a fraction between 0 and 1, such as 0.03"
            )
        if self.max_seconds is not None and not (_is_number(self.max_seconds) and self.max_seconds > 0):
            raise TuningError(f"max_seconds={self.max_seconds!r} is not possible: give a positive number, or None")
        if self.max_val is not None and self.min_val > self.max_val:
            raise TuningError(f"min_val={self.min_val} is above max_val={self.max_val}: exchange them")
        if self.init_val is not None and not self.min_val <= self.init_val <= (self.max_val or self.init_val):
            raise TuningError(
                f"init_val={self.init_val} is not between min_val={self.min_val} and max_val={self.max_val}: begin with"
                " a size that may be chosen"
            )
        if self.make_batch is not None and not callable(self.make_batch):
            raise TuningError(f"make_batch={self.make_batch!r} is no function: give one that makes a batch of a size")
        if self.provoke_oom is not None and not isinstance(self.provoke_oom, bool):
            raise TuningError(f"provoke_oom={self.provoke_oom!r} is not possible: give True, False or None")

    def _check_limits(self) -> None:
        most = self.max_lr_factor
        if most is not None and not (_is_number(most) and most >= 1):
            raise TuningError(
                f"max_lr_factor={self.max_lr_factor!r} is not possible: give a number of at least 1, such as 8, or"
                " float('inf') for no limit"
            )
        if not _is_number(self.max_data_share) or not 0 < self.max_data_share <= 1:
            raise TuningError(
                f"max_data_share={self.max_data_share!r} is not possible: give a share of the data set above 0 and up"
                " to 1, such as 0.1"
            )
        if not _is_number(self.min_efficiency) or not 0 <= self.min_efficiency <= 1:
            raise TuningError(
                f"min_efficiency={self.min_efficiency!r} is not possible: give a share from 0 to 1, such as 0.9; 0 for"
                " trainings that end at a loss, however many samples that takes"
            )
        if not _is_number(self.min_confidence) or not 0 <= self.min_confidence <= 1:
            raise TuningError(
                f"min_confidence={self.min_confidence!r} is not possible: give a probability from 0 to 1, such as 0.5;"
                " 0 sets whatever is found"
            )


def _check_name(keyword: str, value: Any, *, is_optional: bool) -> None:
    if (value is None and is_optional) or (isinstance(value, str) and value):
        return
    raise TuningError(
        f"{keyword}={value!r} is no name: give that of an attribute, such as 'batch_size' or 'hparams.lr'"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_count(name: str, value: Any, *, least: int, is_optional: bool) -> None:
    if value is None and is_optional:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TuningError(f"{name}={value!r} is not possible: give an int of at least {least}")


def checked_folder(plot_dir: Any) -> Path:
    """The folder for plots.

    Raises:
        TuningError: It is no path.
    """
    if not isinstance(plot_dir, (str, os.PathLike)):
        raise TuningError(f"plot_dir={plot_dir!r} is no path: give the name of a folder, or None")
    return Path(os.fspath(plot_dir))


def misconfiguration(trainer: Any, message: str) -> Exception:
    """A `TuningError` that is the `MisconfigurationException` of the Trainer's Lightning package too."""
    error: Exception = _misconfiguration_class(package_of(trainer) or current_package())(message)
    return error


@functools.cache
def _misconfiguration_class(package: str) -> Any:
    base = import_from(package, "utilities.exceptions").MisconfigurationException
    return type("TuningError", (TuningError, base), {"__module__": "lightning_offload.errors"})
