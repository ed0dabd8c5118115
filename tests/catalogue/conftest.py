"""torch's own catalogues: a share of them, or all with `LIGHTNING_OFFLOAD_TESTS=all` (`make test-catalogue`)."""

from __future__ import annotations

from tests.one_thread import one_thread as one_thread
