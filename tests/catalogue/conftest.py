"""torch's own catalogues: a share of them, or all with `LIGHTNING_OFFLOAD_TESTS=all` (`make test-catalogue`)."""

from __future__ import annotations

from tests.calibrated_once import calibrated_once as calibrated_once
from tests.calibrated_once import calibrations as calibrations
from tests.one_thread import one_thread as one_thread
