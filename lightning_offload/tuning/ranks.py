"""How the ranks of a job agree while they tune: small values, at the tuner's own points, on a channel of its own.

Protocol: every method but `num_ranks` and `rank` is collective: all ranks call it, in the same order, and all leave
it with the same value. Between two calls ranks may do different work, and one may run out of device memory. So the
channel is a gloo group apart from the model's: values travel through host memory, no device allocation can fail, and
a collective that a failed step left half done in the model's group is not paired with one of these.

A rank that never comes ends the wait of the others after a time-out, with an error that says so.

This module imports torch only when a :class:`GlooCoordinator` is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from typing_extensions import Self, override

from lightning_offload.errors import TuningError
from lightning_offload.tuning.trial import Trial

__all__ = ["STOPPED", "Coordinator", "GlooCoordinator", "agreed"]

T = TypeVar("T")

TIMEOUT_SECONDS = 1800.0
"""How long a rank waits for the others: the slowest one may have a trial of minutes to finish."""
STOPPED = "another rank stopped"
"""The reason of a trial that was only ended since another rank's was."""


class Coordinator:
    """The ranks that tune together: one process, which agrees with itself, unless a subclass connects several.

    Attributes:
        told: The last failure of this rank that all know of; None where there is none.
    """

    told: Exception | None = None

    @property
    def num_ranks(self) -> int:
        """How many there are."""
        return 1

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        return 0

    def gather(self, value: T) -> tuple[T, ...]:
        """Return the values of all ranks, in the order of ranks; they must be picklable."""
        return (value,)

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0; it must be picklable."""
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """End the waits of the other ranks."""

    def smallest(self, value: float) -> float:
        """Return the smallest over the ranks."""
        return min(self.gather(float(value)))

    def largest(self, value: float) -> float:
        """Return the largest over the ranks."""
        return max(self.gather(float(value)))

    def is_true_on_all(self, flag: bool) -> bool:
        """Return whether a flag is set on every rank."""
        return all(self.gather(bool(flag)))

    def raise_together(self, failure: Exception | None, what: str) -> None:
        """Make an error of one rank an error of all, so that none waits for it.

        Args:
            failure: What went wrong on this rank, if anything did.
            what: What went wrong, for the other ranks.

        Raises:
            Exception: The failure of this rank.
            TuningError: Another rank has failed.
        """
        texts = self.gather(None if failure is None else f"{type(failure).__name__}: {failure}".partition("\n")[0])
        if failure is not None:
            self.told = failure
            raise failure
        for rank, text in enumerate(texts):
            if text is not None:
                raise TuningError(f"{what} failed on rank {rank} ({text}): see the error there")

    def together(self, work: Callable[[], T], what: str) -> T:
        """Do on each rank what may fail on one of them.

        Args:
            work: What to do; not collective.
            what: What it is, for the other ranks.

        Raises:
            Exception: What this rank's work raised.
            TuningError: Another rank has failed.
        """
        try:
            value = work()
        except Exception as error:
            self.raise_together(error, what)
        self.raise_together(None, what)
        return value


@dataclass(slots=True, kw_only=True)
class GlooCoordinator(Coordinator):
    """All ranks of torch.distributed, over a gloo group that is made when it is first used.

    Making it is collective too, so the first use must be by all ranks. Left as a context it gives the group back; it is
    made again if it is needed again.

    Args:
        timeout_seconds: How long a rank waits for the others before it gives up.
    """

    timeout_seconds: float = TIMEOUT_SECONDS
    _group: Any = None

    @property
    @override
    def num_ranks(self) -> int:
        return int(_distributed().get_world_size())

    @property
    @override
    def rank(self) -> int:
        return int(_distributed().get_rank())

    @override
    def gather(self, value: T) -> tuple[T, ...]:
        values: list[Any] = [None] * self.num_ranks
        with self._waiting() as group:
            _distributed().all_gather_object(values, value, group=group)
        return tuple(values)

    @override
    def broadcast(self, value: T) -> T:
        values = [value]
        with self._waiting() as group:
            _distributed().broadcast_object_list(values, src=0, group=group)
        return values[0]

    @override
    def __exit__(self, *exception: object) -> None:
        group, self._group = self._group, None
        if group is not None and _distributed().is_initialized():
            _distributed().destroy_process_group(group)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[Any]:
        """Give the group; say in one line what a failed wait means."""
        distributed = _distributed()
        try:
            if self._group is None:
                timeout = timedelta(seconds=self.timeout_seconds)
                self._group = distributed.new_group(backend="gloo", timeout=timeout)
            yield self._group
        except RuntimeError as error:
            raise TuningError(
                f"rank {distributed.get_rank()} waited for the other ranks to agree on a trial and failed, after at "
                f"most {self.timeout_seconds:g} s: see what ended them, or raise timeout_seconds"
            ) from error


def _distributed() -> Any:
    """Return torch.distributed, which must be initialized."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise TuningError(
            "torch.distributed is not initialized, so there are no ranks that could agree: "
            "call init_process_group first, or use Coordinator()"
        )
    return distributed


def agreed(trial: Trial, agreement: Coordinator) -> Trial:
    """Make one trial of all ranks' trials; collective, and the same on every rank.

    It is ok where it is on all ranks. Throughput and step times are the slowest rank's, throughput times the number of
    ranks, since the others wait for it; the peak is the largest.

    Args:
        trial: As this rank ran it, with its own throughput.
        agreement: Of the ranks that ran it.

    Returns:
        The trial of the job, with the reason of the first rank that failed by itself.

    Raises:
        TuningError: Ranks tried different sizes.
    """
    trials = agreement.gather(trial)
    sizes = [each.batch_size for each in trials]
    if len(set(sizes)) > 1:
        raise TuningError(f"ranks tried different batch sizes, {sizes}: run the same size on each rank")
    peaks = [each.peak_bytes for each in trials if each.peak_bytes is not None]
    shared = replace(trial, peak_bytes=max(peaks, default=None))
    failed = [(rank, each) for rank, each in enumerate(trials) if not each.is_ok]
    if failed:
        rank, first = next((each for each in failed if each[1].reason != STOPPED), failed[0])
        reason = first.reason if len(trials) == 1 else f"rank {rank}: {first.reason or 'no reason given'}"
        return replace(shared, is_ok=False, samples_per_second=None, step_seconds=(), reason=reason)
    slowest = min(trials, key=lambda each: each.samples_per_second or 0.0)
    speed = (slowest.samples_per_second or 0.0) * len(trials)
    return replace(shared, samples_per_second=speed, step_seconds=slowest.step_seconds, reason="")
