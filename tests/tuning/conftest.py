"""One thread is enough for small tensors, and the quickest."""

from __future__ import annotations

from tests.one_thread import one_thread as one_thread
