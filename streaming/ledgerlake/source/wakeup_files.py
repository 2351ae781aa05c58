"""The files of wake-up times: when topic partitions need a micro-batch without new entries, and how
many of their messages are due when. The pipeline writes them, the planner reads the times.

The two live in different processes. After a micro-batch that changed something, and after another
process has replaced the file, the pipeline writes, in a folder of the checkpoint,

    <batch>.json    {"version": 1, "extends": 16, "expire_after_ms": 3600000,
                     "wakes": {"persistent://public/default/orders-partition-0": 1777626000123},
                     "due": {"persistent://public/default/orders-partition-0": [[1777626000123,
                     1000, 4, 0]]}}

(milliseconds since 1970). The times hold for one ``[chunks] expire_after``. A negative time says
that messages have been due since then and were left to the next micro-batch. ``due`` has the spans
of ``delay.due_times``: time of the first message, length in milliseconds, number of messages, and 1
if that is an estimate. A topic partition can have a thousand spans. So a file that ``extends`` the
one of an earlier micro-batch has the spans of the topic partitions that have changed since; the
earlier file has the spans of the others. If a start does not know the times, it writes a file that
wakes up all topic partitions and has no spans; each gets its spans with its next micro-batch. The
file of the newest micro-batch counts, so a process that was suspended and continues beside its
successor cannot replace the successor's file. A planned micro-batch carries the clock in its
offset, so that it does the same when it is run again; these files only decide when one is planned.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from pyarrow import fs

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.errors import OffsetError
from ledgerlake.stored.fields import exactly, stored
from ledgerlake.stored.files import load_bytes, load_stored, save_json
from ledgerlake.wire.limits import MAX_TIME_MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.stored.places import Place

T = TypeVar("T")

VERSION = 1


@dataclass(frozen=True)
class WakeupTimes:
    """The wake-up times by topic partition: those with messages in state have a time, and the
    spans of their delayed messages as far as these are known. Incomplete messages expire at these
    times only by the ``expire_after_ms`` that is given.
    """

    times_ms: dict[str, int] = field(default_factory=dict)
    due_spans: dict[str, list[DueSpan]] = field(default_factory=dict)
    expire_after_ms: int = 0


@dataclass(frozen=True)
class WakeupFile:
    """The content of a file. If it ``extends`` the file of an earlier micro-batch, it lacks the
    spans of topic partitions that have not changed since.
    """

    wakeups: WakeupTimes
    extends: int | None = None


def load_times_ms(folder: Place) -> dict[str, int]:
    """Return the times of the newest file; none if there is no file, or it is not valid.

    Raises:
        OSError: a file is there and cannot be read.
    """
    # A file can have many spans, and the planner reads it for each micro-batch.
    with contextlib.suppress(OffsetError):
        return _read(folder, newest_wakeup_batch(folder), _times_ms) or {}
    return {}


def newest_digest(folder: Place) -> bytes | None:
    """Return the digest of the newest file; None if there is no file of a micro-batch.

    Raises:
        OSError: a file is there and cannot be read.
    """
    batch_id = newest_wakeup_batch(folder)
    content = None if batch_id is None else load_bytes(folder / _name(batch_id))
    return None if content is None else _digest(content)


def load_wakeup_times(folder: Place) -> WakeupTimes | None:
    """Return what the newest file and those that it extends say; None if there is no file, or one
    of them is missing or not valid.

    Raises:
        OSError: a file is there and cannot be read.
    """
    with contextlib.suppress(OffsetError):
        return read_wakeup_times(folder)
    return None


def read_wakeup_times(folder: Place) -> WakeupTimes | None:
    """Return what the newest file and those that it extends say; None if there is no file.

    Raises:
        OffsetError: a newer release wrote one of them, it is damaged or missing, or not all topic
            partitions are counted yet.
        OSError: one of them cannot be read.
    """
    batch_id = newest_wakeup_batch(folder)
    while (wakeups := _read_extended(folder, batch_id)) is None and batch_id is not None:
        newer = newest_wakeup_batch(folder)
        if newer == batch_id:
            raise OffsetError(
                "the checkpoint lacks wake-up times of an earlier micro-batch; restore all of its "
                "files"
            )
        # A pipeline that runs has written a file that extends none, and removed those before it.
        batch_id = newer
    return wakeups


def _read_extended(folder: Place, batch_id: int | None) -> WakeupTimes | None:
    """Return what a file and those that it extends say; None if one of them is missing."""
    newest = file = _read(folder, batch_id, _file)
    due_spans: dict[str, list[DueSpan]] = {}
    while newest is not None and file is not None:
        due_spans = file.wakeups.due_spans | due_spans
        if file.extends is None:
            times_ms = newest.wakeups.times_ms
            if unknown := times_ms.keys() - due_spans.keys():
                raise OffsetError(
                    f"the checkpoint does not say when the delayed messages of {min(unknown)} are "
                    "due; run the pipeline: its next micro-batches count them"
                )
            return replace(newest.wakeups, due_spans={name: due_spans[name] for name in times_ms})
        if batch_id is None or file.extends >= batch_id:
            raise OffsetError(
                f"the wake-up times of micro-batch {batch_id} extend the times of {file.extends}; "
                "restore them"
            )
        batch_id = file.extends
        file = _read(folder, batch_id, _file)
    return None


def _read(folder: Place, batch_id: int | None, read: Callable[[dict[str, Any]], T]) -> T | None:
    return (
        None
        if batch_id is None
        else load_stored(folder / _name(batch_id), "wake-up times", read, VERSION)
    )


def newest_wakeup_batch(folder: Place) -> int | None:
    """Return the micro-batch whose file counts; None if there is no file of a micro-batch."""
    names = _names(folder)
    return int(names[-1].removesuffix(".json")) if names else None


def save_wakeup_times(
    folder: Place, batch_id: int, wakeups: WakeupTimes, extends: int | None = None
) -> bytes:
    """Write the file of a micro-batch, and return its digest. If it extends none, the files before
    it are removed.

    Args:
        extends: see ``WakeupFile``.

    Raises:
        OSError: it cannot be written.
    """
    due = {name: [_numbers(span) for span in spans] for name, spans in wakeups.due_spans.items()}
    fields = {
        "version": VERSION,
        "extends": extends,
        "expire_after_ms": wakeups.expire_after_ms,
        "wakes": wakeups.times_ms,
        "due": due,
    }
    digest = _digest(save_json(folder / _name(batch_id), fields))
    if extends is not None:
        return digest
    filesystem = folder.filesystem()
    # The planner may be about to read the times of the previous file.
    for name in [name for name in _names(folder) if name < _name(batch_id)][:-1]:
        with contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(f"{folder.root}/{name}")
    return digest


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _span(first_ms: int, length_ms: int, count: int, is_estimate: int) -> DueSpan:
    return DueSpan(first_ms, length_ms, count, bool(is_estimate))


def _numbers(span: DueSpan) -> tuple[int, int, int, int]:
    return span.first_ms, span.length_ms, span.count, int(span.is_estimate)


def _name(batch_id: int) -> str:
    return f"{batch_id:010d}.json"


def _names(folder: Place) -> list[str]:
    files = folder.filesystem().get_file_info(fs.FileSelector(folder.root, allow_not_found=True))
    return sorted(
        file.base_name for file in files if file.base_name.removesuffix(".json").isdecimal()
    )


def _times_ms(fields: dict[str, Any]) -> dict[str, int]:
    wakes, *_ = exactly(fields, "wakes", "due", "extends", "expire_after_ms")
    times_ms: dict[str, int] = stored(dict[str, int], wakes)
    return times_ms


def _file(fields: dict[str, Any]) -> WakeupFile:
    due = stored(dict[str, list[list[int]]], fields["due"])
    due_spans = {name: [_span(*numbers) for numbers in spans] for name, spans in due.items()}
    for span in chain.from_iterable(due_spans.values()):
        if not 0 <= span.first_ms <= MAX_TIME_MS or span.length_ms < 1:
            raise ValueError(f"{span} is no span")
    return WakeupFile(
        WakeupTimes(_times_ms(fields), due_spans, stored(int, fields["expire_after_ms"])),
        stored(int | None, fields["extends"]),
    )
