"""The files of wake-up times: when topic partitions need a micro-batch without new entries, and how
many of their messages are due when. The pipeline writes them, the planner reads the times.

The two live in different processes. After a micro-batch that changed something, and after another
process has replaced the file, the pipeline writes, in a folder of the checkpoint,

    <batch>.json    {"version": 1,
                     "wakes": {"persistent://public/default/orders-partition-0": 1777626000123},
                     "due": {"persistent://public/default/orders-partition-0": [[1777626000123, 1000, 4, 0]]}}

(milliseconds since 1970). A negative time says that messages have been due since then and were left
to the next micro-batch. ``due`` has the spans of ``delay.due_times``: time of the first message,
length in milliseconds, number of messages, and 1 if that is an estimate. The file of the newest
micro-batch counts, so a process that was suspended and continues beside its successor cannot replace
the successor's file. A planned micro-batch carries the clock in its offset, so that it does the same
when it is run again; these files only decide when one is planned.

Earlier builds wrote no ``due``, and still earlier ones kept one file for all, beside the folder.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from pyarrow import fs

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.errors import OffsetError
from ledgerlake.stored.fields import stored
from ledgerlake.stored.files import load_stored, save_json
from ledgerlake.wire.limits import MAX_TIME_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.stored.places import Place

T = TypeVar("T")

VERSION = 1


@dataclass(frozen=True)
class WakeupTimes:
    """The content of a file, by topic partition: those with messages in state have a time, and the
    spans of their delayed messages as far as these are known.
    """

    times_ms: dict[str, int] = field(default_factory=dict)
    due_spans: dict[str, list[DueSpan]] = field(default_factory=dict)

    @property
    def counts_are_known(self) -> bool:
        """Return whether ``due_spans`` has all delayed messages. An earlier build wrote none."""
        return self.times_ms.keys() <= self.due_spans.keys()


def load_times_ms(folder: Place) -> dict[str, int]:
    """Return the times of the newest file; none if there is no file, or it is not valid.

    Raises:
        OSError: a file is there and cannot be read.
    """
    # A file can have many spans, and the planner reads it for each micro-batch.
    with contextlib.suppress(OffsetError):
        return _read(folder, _times_ms) or {}
    return {}


def load_wakeup_times(folder: Place) -> WakeupTimes | None:
    """Return the content of the newest file; None if there is no file, or it is not valid.

    Raises:
        OSError: a file is there and cannot be read.
    """
    with contextlib.suppress(OffsetError):
        return read_wakeup_times(folder)
    return None


def read_wakeup_times(folder: Place) -> WakeupTimes | None:
    """Return the content of the newest file; None if there is no file.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
        OSError: it cannot be read.
    """
    return _read(folder, _wakeups)


def _read(folder: Place, read: Callable[[dict[str, Any], int], T]) -> T | None:
    names = _names(folder)
    file = folder / names[-1] if names else replace(folder, uri=f"{folder.uri}.json")
    return load_stored(file, "wake-up times", read, VERSION)


def newest_wakeup_batch(folder: Place) -> int | None:
    """Return the micro-batch whose file counts; None if there is no file of a micro-batch."""
    names = _names(folder)
    return int(names[-1].removesuffix(".json")) if names else None


def save_wakeup_times(folder: Place, batch_id: int, wakeups: WakeupTimes) -> None:
    """Write the file of a micro-batch.

    Raises:
        OSError: it cannot be written.
    """
    due = {name: [_numbers(span) for span in spans] for name, spans in wakeups.due_spans.items()}
    save_json(folder / f"{batch_id:010d}.json", {"version": VERSION, "wakes": wakeups.times_ms, "due": due})
    filesystem = folder.filesystem()
    # The planner may be about to read the previous file.
    for name in _names(folder)[:-2]:
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{folder.root}/{name}")


def _span(first_ms: int, length_ms: int, count: int, is_estimate: int) -> DueSpan:
    return DueSpan(first_ms, length_ms, count, bool(is_estimate))


def _numbers(span: DueSpan) -> tuple[int, int, int, int]:
    return span.first_ms, span.length_ms, span.count, int(span.is_estimate)


def _names(folder: Place) -> list[str]:
    files = folder.filesystem().get_file_info(fs.FileSelector(folder.root, allow_not_found=True))
    return sorted(file.base_name for file in files if file.base_name.removesuffix(".json").isdecimal())


def _times_ms(fields: dict[str, Any], _version: int) -> dict[str, int]:
    times_ms: dict[str, int] = stored(dict[str, int], fields["wakes"])
    return times_ms


def _wakeups(fields: dict[str, Any], version: int) -> WakeupTimes:
    due = stored(dict[str, list[list[int]]], fields.get("due", {}))
    due_spans = {name: [_span(*numbers) for numbers in spans] for name, spans in due.items()}
    for span in chain.from_iterable(due_spans.values()):
        if not 0 <= span.first_ms <= MAX_TIME_MS or span.length_ms < 1:
            raise ValueError(f"{span} is no span")
    return WakeupTimes(_times_ms(fields, version), due_spans)
