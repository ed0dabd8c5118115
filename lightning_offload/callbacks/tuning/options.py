"""The keywords of a finder, checked; and errors that are Lightning's own kind too."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_offload.errors import TuningError
from lightning_offload.lightning_packages import import_from, package_for
from lightning_offload.tuning.learning_rate import SCALINGS
from lightning_offload.tuning.ranges import check_ranges

OBJECTIVES = ("auto", "keep_effective_batch", "goodput", "throughput")
ON_FAILURE = ("keep", "raise")

__all__ = ["OBJECTIVES", "ON_FAILURE", "AdvancedTuning", "FinderOptions", "checked_folder", "misconfiguration"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvancedTuning:
    """What few users of `EfficientBatchSizeFinder` set: its keyword `advanced`, as this record or as a mapping.

    Attributes:
        init_val: Batch size to begin with; by default the configured one.
        steps_per_trial: Steps that are timed in a trial.
        warmup_steps: Steps before them that are not.
        tolerance: How far below the best throughput the chosen size may be, as a fraction of it.
        base_batch_size: Effective batch that the configured rate is for; by default the configured one.
        lr_warmup_steps: Optimizer steps over which a raised rate is reached; by default 50, or a tenth of the run where
            that is less. 0 for no warm-up. A rate that is not scaled up is not warmed up.
        max_lr_factor: By how much the rate may be raised at most; by default 16 where the noise scale is measured, and
            8 where it is not.
        max_data_share: The largest effective batch, as a share of the data set.
        min_confidence: How sure the search has to be, from 0 to 1, that the size that it found is right. Below it a
            size is set with which the run surely ends 1.05 times as early (for objective "throughput": has as many
            more samples per second), where there is one; else the configured size and rate stay, unless that size does
            not fit. With 0 and objective "throughput" whatever is found is set.
        min_efficiency: For goodput, what a sample is worth at least in the larger batch, by what it is worth in the
            configured one: a run of so many epochs makes that share of its progress. 0 for trainings that end at a
            loss.
        multiple_of: Sizes other than the configured one are multiples of this.
        max_trials: Most trials; by default 12 where sizes can be predicted, and 24 where not.
        pilot_steps: Most optimizer steps of the pilot that are measured; as many batches as these take are trained on
            before.
        allow_oom: Whether a trial may run out of memory. By default it may, unless ranks talk to one another within
            a step (SyncBatchNorm, sharding, own collectives); then sizes that may not fit are predicted.

    Raises:
        TuningError: A value is not possible.
    """

    init_val: int | None = None
    steps_per_trial: int = 5
    warmup_steps: int = 2
    tolerance: float = 0.03
    base_batch_size: int | None = None
    lr_warmup_steps: int | None = None
    max_lr_factor: float | None = None
    max_data_share: float = 0.1
    min_confidence: float = 0.5
    min_efficiency: float = 0.9
    multiple_of: int = 1
    max_trials: int | None = None
    pilot_steps: int = 128
    allow_oom: bool | None = None

    @classmethod
    def of(cls, given: AdvancedTuning | Mapping[str, Any] | None) -> AdvancedTuning:
        """The record that a user gave, or that a mapping stands for.

        Raises:
            TuningError: It is neither, or has an entry that is none of these.
        """
        if isinstance(given, AdvancedTuning):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise TuningError(f"advanced={given!r} is a {type(given).__name__}: give an AdvancedTuning or a mapping")
        names = [field.name for field in dataclasses.fields(AdvancedTuning)]
        unknown = next((name for name in given or {} if name not in names), None)
        if unknown is not None:
            raise TuningError(f"advanced={{{unknown!r}: ...}} is not known: choose among {', '.join(names)}")
        return AdvancedTuning(**(given or {}))

    def __post_init__(self) -> None:
        check_ranges(dataclasses.asdict(self))
        if self.allow_oom is not None and not isinstance(self.allow_oom, bool):
            raise TuningError(f"allow_oom={self.allow_oom!r} is not possible: give True, False or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinderOptions(AdvancedTuning):
    """All that the user asked for; see `EfficientBatchSizeFinder`.

    Raises:
        TuningError: A value is not possible.
    """

    batch_arg_name: str
    lr_arg_name: str | None
    objective: str
    min_val: int
    max_val: int | None
    lr_scaling: str
    max_seconds: float | None
    on_failure: str

    def __post_init__(self) -> None:
        super(FinderOptions, self).__post_init__()  # a class with slots is another one than this
        for name, what, allowed in (
            ("lr_scaling", "learning rate rule", SCALINGS),
            ("objective", "objective", OBJECTIVES),
            ("on_failure", "on_failure", ON_FAILURE),
        ):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in allowed:
                raise TuningError(f"unknown {what} {value!r}: choose one of {', '.join(map(repr, allowed))}")
        _check_name("batch_arg_name", self.batch_arg_name, is_optional=False)
        _check_name("lr_arg_name", self.lr_arg_name, is_optional=True)
        if self.max_val is not None and self.min_val > self.max_val:
            raise TuningError(f"min_val={self.min_val} is above max_val={self.max_val}: exchange them")
        if self.init_val is not None and not self.min_val <= self.init_val <= (self.max_val or self.init_val):
            raise TuningError(
                f"init_val={self.init_val} is not between min_val={self.min_val} and max_val={self.max_val}: begin with"
                " a size that may be chosen"
            )


def _check_name(keyword: str, value: Any, *, is_optional: bool) -> None:
    if (value is None and is_optional) or (isinstance(value, str) and value):
        return
    raise TuningError(
        f"{keyword}={value!r} is no name: give that of an attribute, such as 'batch_size' or 'hparams.lr'"
    )


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
    error: Exception = _misconfiguration_class(package_for(trainer))(message)
    return error


@functools.cache
def _misconfiguration_class(package: str) -> Any:
    base = import_from(package, "utilities.exceptions").MisconfigurationException
    return type("TuningError", (TuningError, base), {"__module__": "lightning_offload.errors"})
