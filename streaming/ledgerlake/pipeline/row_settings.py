"""The settings that decide which rows a micro-batch gives, and where delayed messages are kept.

A micro-batch that is run again must give the same rows, so these settings must not change until it
is committed. The checkpoint has them in ``ledgerlake/settings.json``, by their names in the
configuration file:

    {"version": 1, "settings": {"[delay] enabled": true, "[delay] storage": "state"}}

If the file lacks a setting, the release that wrote it did not have or record it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledgerlake.stored.fields import stored

if TYPE_CHECKING:
    from ledgerlake.options.config import Config

VERSION = 1

Setting = bool | int | str | None
RowSettings = dict[str, Setting]

STORAGE = "[delay] storage"
PAYLOADS = "[delay] payloads"


def row_settings(config: Config) -> RowSettings:
    """Return the settings of a configuration."""
    return {
        "[source] crypto_failure_action": config.source.crypto_failure_action,
        "[source] message_payload_processor": config.source.message_payload_processor,
        "[chunks] max_pending": config.chunks.max_pending,
        "[chunks] max_pending_bytes": config.chunks.max_pending_bytes,
        "[chunks] max_message_bytes": config.chunks.max_message_bytes,
        "[chunks] expire_after": config.chunks.limits.expire_after_ms,
        "[delay] enabled": config.delay.enabled,
        STORAGE: config.delay.storage,
        PAYLOADS: config.delay.payloads,
    }


def changed(before: RowSettings, now: RowSettings) -> list[str]:
    """Return the names of the recorded settings whose values have changed."""
    return [name for name, value in before.items() if name in now and now[name] != value]


def read_settings(data: dict[str, Any], _version: int) -> RowSettings:
    """Read the settings in a checkpoint; for ``stored.files.load_stored``."""
    settings: RowSettings = stored(dict[str, Any], data["settings"])
    for name, value in settings.items():
        if not isinstance(value, (bool, int, str, type(None))):
            raise ValueError(f"{name} is not a text, a number, true or false")
    return settings
