"""What every reader of a source must know besides how to reach the cluster; travels with it to
Spark's workers.
"""

from __future__ import annotations

from dataclasses import dataclass

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.decode.crypto import NO_KEYS, CryptoSettings


@dataclass(frozen=True)
class ReadSettings(ClientSettings):
    """``converter``: a function of the user's (``package.module:name``) for the last entry of a
    compacted topic, see ``last_entry``.

    ``crypto``: what opens encrypted entries.
    """

    converter: str | None = None
    crypto: CryptoSettings = NO_KEYS
