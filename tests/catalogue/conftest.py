"""torch's own catalogues; `LIGHTNING_OFFLOAD_CATALOGUE=all` has all of them run (`make test-catalogue`), not a share."""

from __future__ import annotations

from tests.calibrated_once import calibrated_once as calibrated_once
from tests.calibrated_once import calibrations as calibrations
from tests.one_thread import one_thread as one_thread
