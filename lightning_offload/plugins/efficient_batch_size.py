"""Where :mod:`lightning_offload.tuning.function` was."""

from lightning_offload.tuning.function import *  # noqa: F403
