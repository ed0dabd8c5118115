"""Where :mod:`~lightning_offload.plugins.report` was."""

from lightning_offload.plugins.report import *  # noqa: F403
