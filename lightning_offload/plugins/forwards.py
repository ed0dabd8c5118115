"""Several forwards before one backward are one step: siamese and contrastive models, two networks, two passes.

A forward that begins while autograd holds what the one before saved, and before any backward, goes on with that one's
step. What a step will be is known when it has ended; so by its first forward the coming one is taken to be as the last
one was that began with the very same, else to go on as the longer of the last two did that began like it. Sizes of
further forwards that were those of the first one are so again; others are as large as they were in either.
"""

from __future__ import annotations

from collections import OrderedDict

from lightning_offload.plugins.shape_families import Sizes, StepShape, short

_MOST_REMEMBERED = 1024  # chains of shapes; more are no habit

Chain = tuple[StepShape, ...]


class Forwards:
    """The forwards of the step under way, and of those before it."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Chain, ...]] = {}
        self._same: OrderedDict[str, Chain] = OrderedDict()
        self._expected: Chain = ()
        self._seen: list[StepShape] = []

    @property
    def num_seen(self) -> int:
        """How many the step had so far."""
        return len(self._seen)

    @property
    def expects_more(self) -> bool:
        """Whether the step is to have another one."""
        return len(self._seen) < len(self._expected)

    def begin(self, shape: StepShape) -> StepShape:
        """A step begins; what it is taken to be.

        Args:
            shape: Of its first forward.
        """
        known = self._last.get(shape.family, ())
        longest = max(known, key=len, default=(shape,))
        alike = [chain for chain in known if _families(chain) == _families(longest)]
        same = self._same.get(shape.signature)
        if same is not None and _families(same) == _families(longest):
            expected = same
        else:
            expected = (shape, *(_foreseen(shape, alike, i) for i in range(1, len(longest))))
        self._seen, self._expected = [shape], expected
        return together(expected)

    def go_on(self, shape: StepShape) -> None:
        """The step has another forward."""
        self._seen.append(shape)

    def abandon(self) -> None:
        """The step came to nothing: an error ended it."""
        self._seen, self._expected = [], ()

    def end(self) -> tuple[StepShape, bool] | None:
        """The step has ended.

        Returns:
            What it was, and whether it was a shorter or a smaller one than it was taken to be; None as it was taken.
        """
        seen, expected = tuple(self._seen), self._expected
        if not seen:
            return None
        family = seen[0].family
        self._last[family] = (*self._last.get(family, ()), seen)[-2:]
        self._same[seen[0].signature] = seen
        self._same.move_to_end(seen[0].signature)
        if len(self._same) > _MOST_REMEMBERED:
            self._same.popitem(last=False)
        self._seen = []
        if seen == expected or together(seen).signature == together(expected).signature:
            return None
        return together(seen), _families(seen) == _families(expected)[: len(seen)]


def together(chain: Chain) -> StepShape:
    """What a step of several forwards is known by."""
    first, *others = chain
    if not others:
        return first
    return StepShape(
        short("\n".join([first.signature, *(f"{shape.family} {shape.sizes}" for shape in others)])),
        short("\n".join(_families(chain))),
        tuple(row for shape in chain for row in shape.shapes),
        tuple(size for shape in chain for size in shape.sizes),
    )


def _families(chain: Chain) -> list[str]:
    return [shape.family for shape in chain]


def _foreseen(first: StepShape, alike: list[Chain], i: int) -> StepShape:
    """What the i-th forward of a step is taken to be.

    Args:
        first: The step's first one.
        alike: Steps before it.
        i: Which one.
    """
    if len({chain[i].signature for chain in alike}) == 1 and len({chain[0].signature for chain in alike}) > 1:
        return alike[0][i]

    def foreseen(numbers: list[Sizes]) -> Sizes:
        known = zip(*(chain[0].sizes for chain in alike), strict=True)
        there = {column: first.sizes[place] for place, column in enumerate(known)}
        return tuple(there.get(column, max(column)) for column in zip(*numbers, strict=True))

    rows = tuple(foreseen([chain[i].shapes[row] for chain in alike]) for row in range(len(alike[0][i].shapes)))
    return StepShape("", alike[0][i].family, rows, foreseen([chain[i].sizes for chain in alike]))
