"""Where :mod:`~lightning_offload.planning.trace` was."""

from lightning_offload.planning.trace import *  # noqa: F403
