"""Plans that are followed need not be the fastest."""

from __future__ import annotations

from tests.short_searches import short_searches as short_searches
