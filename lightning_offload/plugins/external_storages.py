"""The persistent storages that a recorded step touches, by which is told what is on the device beside such steps.

What the step touches counts in its graph, and gradients of earlier steps are counted apart. In place of what is gone by
now (the recorded step's batch, say) the coming step has its own.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Collection

import torch

from lightning_offload.capture.live import LiveBytes
from lightning_offload.plugins.baseline import There

StorageRef = weakref.ref[torch.UntypedStorage]
"""Weak, since addresses are used again."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExternalStorages:
    """The persistent storages that a recorded step touches.

    Attributes:
        references: These, by identity.
        known: Those of them that were there when it began, gradients aside, with their bytes; None where nobody looked.
    """

    references: dict[int, StorageRef] = dataclasses.field(default_factory=dict)
    known: list[tuple[StorageRef, int]] | None = None

    @classmethod
    def seen(cls, live: LiveBytes, gradients: Collection[int]) -> ExternalStorages:
        """Those of a step whose bytes were counted.

        Args:
            live: What counted them.
            gradients: Identities of the gradients that were there when it began.
        """
        found = {key: entry for key, entry in live.external.items() if key not in gradients}
        return cls({key: entry[0] for key, entry in found.items()}, list(found.values()))

    def now(self) -> set[int]:
        """Identities of those that still live."""
        return {key for key, reference in self.references.items() if reference() is not None}

    def baseline_bytes(self, there: There, gradients: Collection[int], *, has_inputs: bool) -> int | None:
        """What is on the device beside the coming step; None where it is not known yet.

        Args:
            there: What is on the device.
            gradients: Identities of gradients.
            has_inputs: Whether what the coming step has in place of what is gone is there: as one begins.
        """
        if self.known is None:
            return None
        if not there.is_whole:
            return self._followed(there, gradients)
        excluded = self.now().union(gradients)
        baseline = there.bytes_but(excluded)
        gone_bytes = sum(num_bytes for reference, num_bytes in self.known if reference() is None)
        return max(0, baseline - gone_bytes) if has_inputs else baseline

    def _followed(self, there: There, gradients: Collection[int]) -> int:
        """The same where nobody listed all: in place of what is gone lies what is as large; an input may be larger."""
        excluded = {*self.now(), *gradients}
        unmatched = Counter(num_bytes for reference, num_bytes in self.known or [] if reference() is None)
        baseline_bytes = spare_bytes = 0
        found = (
            (key in there.inputs, storage.nbytes()) for key, storage in there.storages.items() if key not in excluded
        )
        for is_input, num_bytes in (*found, *((False, num_bytes) for num_bytes in there.replaced)):
            if unmatched[num_bytes]:
                unmatched[num_bytes] -= 1
                continue
            baseline_bytes += num_bytes
            spare_bytes += num_bytes if is_input else 0
        return baseline_bytes - min(spare_bytes, sum(size * number for size, number in unmatched.items()))

    def baseline_bytes_of(self, held_bytes: int, taken: Callable[[int], int], *, has_inputs: bool) -> int | None:
        """The same of the allocator's figure.

        Args:
            held_bytes: What it has handed out, gradients aside.
            taken: What it hands out for so many bytes.
            has_inputs: Whether what the coming step has in place of what is gone is there.
        """
        if self.known is None:
            return None
        external = sum(taken(num_bytes) for reference, num_bytes in self.known if has_inputs or reference() is not None)
        return max(0, held_bytes - external)
