"""The settings that decide which rows a micro-batch gives, and where delayed messages are kept.

A micro-batch that is run again must give the same rows, so these settings must not change until it
is committed. The places of the tables must not change either: see ``start``. A test says of every
other option why it changes no row (``tests/pipeline/test_row_settings.py``). The checkpoint has
them in ``ledgerlake/settings.json``, by their names in the configuration file:

    {"version": 1, "settings": {"[delay] enabled": true, "[delay] storage": "state"}}

If the file lacks a setting, the release that wrote it did not have or record it. A place has many
spellings, and one in the checkpoint moves with it. So ``[delay] storage`` is compared as a place,
and ``storage in the checkpoint`` says where below the checkpoint it is, null if it is elsewhere.

The delivery has one beginning: ``[deliver] starting`` as it was at the first start with
``[deliver]``. It stays while ``[deliver]`` is removed, and is handed to the tasks of every run. So
a topic partition whose delayed messages are first touched later begins there too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ledgerlake.errors import UsageError
from ledgerlake.pipeline.moved_state import move_between
from ledgerlake.stored.fields import exactly, stored
from ledgerlake.stored.places import Place, parse_place
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from ledgerlake.options.config import Config, DeliverConfig
    from ledgerlake.stored.offsets import Offset

VERSION = 1

Setting = bool | int | str | None
RowSettings = dict[str, Setting]


@dataclass(frozen=True)
class Selected:
    """The ``selection`` of the last run that has committed a micro-batch to its tables, and up to
    where topic partitions were read under an earlier one: ``verify`` cannot know which tables have
    to have those messages.
    """

    settings: RowSettings
    earlier_ends: dict[str, Position]

    def to_json(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


STORAGE = "[delay] storage"
PAYLOADS = "[delay] payloads"
STARTING = "[deliver] starting"
_DELIVERS = "[deliver]"
TABLES = "[[tables]]"
_BELOW = "storage in the checkpoint"
_STATE = "state"


def row_settings(config: Config, before: RowSettings | None = None) -> RowSettings:
    """Return the settings of a configuration.

    Args:
        before: the settings that the checkpoint has.
    """
    return {
        "[source] read_compacted": config.source.read_compacted,
        "[source] max_uncompressed_bytes": config.source.max_uncompressed_bytes,
        "[source] crypto_key_folder": config.source.crypto_key_folder,
        "[source] crypto_key_reader": config.source.crypto_key_reader,
        "[source] crypto_failure_action": config.source.crypto_failure_action,
        "[source] message_payload_processor": config.source.message_payload_processor,
        "[chunks] max_pending": config.chunks.max_pending,
        "[chunks] max_pending_bytes": config.chunks.max_pending_bytes,
        "[chunks] max_message_bytes": config.chunks.max_message_bytes,
        "[chunks] expire_after": config.chunks.limits.expire_after_ms,
        "[delay] enabled": config.delay.enabled,
        STORAGE: config.delay.storage,
        _BELOW: _below(config.delay.storage, config.checkpoint_place),
        PAYLOADS: config.delay.payloads,
        "[delay] max_repetitions_per_second": config.delay.max_repetitions_per_second,
        "[delay] max_repeated_bytes_per_second": config.delay.max_repeated_bytes_per_second,
        # Messages for the target topic are part of a micro-batch's outcome too, and depend on the
        # beginning of the delivery.
        _DELIVERS: None if config.deliver is None else "set",
        STARTING: _beginning(config.deliver, (before or {}).get(STARTING)),
        TABLES: ", ".join(table.name for table in config.table_options),
        **{table.section: table.row_settings for table in config.table_options},
    }


def selection(config: Config) -> RowSettings:
    """Return what decides which tables have to have a message, whatever the order of the tables."""
    tables = sorted((table.row_settings, str(table.place)) for table in config.table_options)
    return {
        "tables": json.dumps([settings for settings, _ in tables]),
        "places": json.dumps([str(config.rejects_place), *(place for _, place in tables)]),
        "checkpoint": str(config.checkpoint_place),
    }


def selected_now(before: Selected | None, config: Config, committed: Offset) -> Selected:
    """Return the record of a run under a configuration.

    Args:
        before: that of the last run.
        committed: the offset up to which earlier runs have read.
    """
    settings = selection(config)
    if before is None:
        return Selected(settings, {})
    if _selects_same(before.settings, settings):
        return Selected(settings, before.earlier_ends)
    return Selected(settings, {name: offset.last_position for name, offset in committed.items()})


def _selects_same(before: RowSettings, now: RowSettings) -> bool:
    """Return whether two selections are the same. If the checkpoint was moved, its tables may have
    been moved with it.
    """
    if before.get("tables") != now["tables"]:
        return False
    move = move_between(str(before.get("checkpoint")), str(now["checkpoint"]))
    places = [json.loads(str(settings.get("places", "[]"))) for settings in (before, now)]
    return len(places[0]) == len(places[1]) and all(
        move.name_among(former, [place]) == place for former, place in zip(*places, strict=True)
    )


def _beginning(deliver: DeliverConfig | None, former: Setting) -> Setting:
    """Return where the delivery begins; None before the first start with ``[deliver]``. From
    ``latest`` it goes to ``earliest`` once nothing waits, and all that comes is for the topic.
    """
    return former if deliver is None or former == "earliest" else deliver.starting


def delivery_of(settings: RowSettings) -> str | None:
    """Return where the delivery begins, by the settings of a run."""
    beginning = settings[STARTING]
    return None if beginning is None else str(beginning)


def changed(before: RowSettings, now: RowSettings) -> list[str]:
    """Return the names of the recorded settings whose values have changed."""
    names = [
        name
        for name, value in before.items()
        if name in now and now[name] != value and name != _BELOW
    ]
    return [name for name in names if name != STORAGE or not _is_same_storage(before, now)]


def is_needed_in_state(name: str, before: RowSettings, now: RowSettings) -> bool:
    """Return whether messages that wait need the former value of a setting that has changed. Those
    that waited when delivery began at ``latest`` are for no topic, whatever its name.
    """
    change = before[name], now[name]
    return (
        name == STORAGE
        or (name == PAYLOADS and change[0] == "reread")
        or (name == STARTING and change == ("latest", "earliest"))
    )


def _is_same_storage(before: RowSettings, now: RowSettings) -> bool:
    if before.get(_BELOW) is not None and before[_BELOW] == now.get(_BELOW):
        return True
    place = _storage_place(before[STORAGE])
    return place is not None and place == _storage_place(now[STORAGE])


def _storage_place(storage: Setting) -> str | None:
    """Return the one name of a place; None for the state store, or if the
    text is not a place.
    """
    if not isinstance(storage, str) or storage == _STATE:
        return None
    try:
        place = parse_place(storage, STORAGE)
    except UsageError:
        return None
    return place.uri


def _below(storage: str, checkpoint: Place) -> str | None:
    """Return the path of the storage inside the checkpoint; None if it is elsewhere."""
    place, folder = _storage_place(storage), f"{checkpoint.uri}/"
    return place.removeprefix(folder) if place is not None and place.startswith(folder) else None


def read_settings(data: dict[str, Any]) -> RowSettings:
    """Read the settings in a checkpoint; for ``stored.files.load_stored``."""
    (found,) = exactly(data, "settings")
    return _settings(found)


def _settings(found: Any) -> RowSettings:
    settings: RowSettings = stored(dict[str, Any], found)
    for name, value in settings.items():
        if not isinstance(value, (bool, int, str, type(None))):
            raise ValueError(f"{name} is not a text, a number, true or false")
    return settings


def read_selected(data: dict[str, Any]) -> Selected:
    """Read the selection in a checkpoint; for ``stored.files.load_stored``."""
    settings, ends = exactly(data, "settings", "earlier_ends")
    earlier_ends: dict[str, Position] = stored(dict[str, Position], ends)
    return Selected(_settings(settings), earlier_ends)
