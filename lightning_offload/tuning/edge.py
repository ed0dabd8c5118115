"""Where the budget ends: between the largest size that fits and the smallest that does not; given by draws.

Without a prediction every place in between is as likely, in the logarithm. With one the edge is most likely near the
predicted one, and one draw in five still says anywhere.
"""

from __future__ import annotations

import numpy as np

from lightning_offload.tuning.curve import NUM_DRAWS, Array

__all__ = ["draw_edges"]

_DEVIATION = 0.2  # of a predicted edge's logarithm
_DOUBT = 5  # one draw in so many does not heed the prediction
_OPEN = 0.8  # share of draws that see no edge where none was met or predicted


def draw_edges(fits: int, top: int, *, is_open: bool, predicted: int | None) -> Array:
    """Draw the largest size that fits.

    Args:
        fits: The largest that is known to fit.
        top: The largest that comes into question.
        is_open: Nothing failed yet, so there may be no edge below `top` at all.
        predicted: The predicted edge, where a model predicts one.

    Returns:
        One size a draw, from `fits` to `top`.
    """
    rng = np.random.default_rng(1)
    spread = rng.permutation((np.arange(NUM_DRAWS) + 0.5) / NUM_DRAWS)
    draws = fits * ((top + 1) / fits) ** spread
    number = np.arange(NUM_DRAWS)
    if predicted is not None:
        near = predicted * np.exp(_DEVIATION * rng.standard_normal(NUM_DRAWS))
        is_used = (near >= fits) & (near < top + 1) & (number % _DOUBT != 0)
        draws = np.where(is_used, near, draws)
    elif is_open:
        draws = np.where(number < _OPEN * NUM_DRAWS, top, draws)
    return np.floor(draws).clip(fits, top)
