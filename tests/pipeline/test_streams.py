"""Messages and rejects as streaming DataFrames: what is refused before Spark is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.streams import messages, rejects

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("stream", [messages, rejects])
def test_a_stream_without_a_cursor_starts_at_none(stream: Callable[..., Any]) -> None:
    config = parse_config(
        {
            "source": {"service_url": "pulsar://h:1", "topics": ["t"], "starting": "cursor"},
            "stream": {"name": "n"},
            "delta": {"path": "p"},
        }
    )
    with pytest.raises(UsageError, match="have no cursor"):
        stream(cast(Any, None), config)
