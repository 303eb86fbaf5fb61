"""Settings of a store: their bounds."""

from __future__ import annotations

import pytest

from headrace.paramserver.store.store_config import StoreConfig
from headrace.schemas.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_cache_bytes", 0), ("write_buffer_bytes", -1), ("max_background_jobs", 0)],
)
def test_bad_settings_are_refused(name: str, value: object) -> None:
    """A setting out of range is named."""
    with pytest.raises(ConfigError, match=name):
        StoreConfig(**{name: value})  # type: ignore[arg-type]
