"""The durable cursors of a query's planner. It moves them if the source has a subscription of its
own; for a pipeline it only creates them, and the pipeline moves them (see ``pipeline.cursors``).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.cursor import DurableCursor
from ledgerlake.errors import ConsumerBusyError, LedgerlakeError, TopicNotFoundError
from ledgerlake.source.bounds import end_position
from ledgerlake.source.loss import moved_to
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.stored.offsets import Offset
    from ledgerlake.wire.message_id import Position


class SourceCursors:
    """The cursors of one query, by topic partition; none if the source has no subscription."""

    def __init__(self, cluster: Cluster, options: SourceOptions) -> None:
        self._cluster = cluster
        self._options = options
        self._cursors: dict[str, DurableCursor] = {}

    @property
    def is_pinned(self) -> bool:
        """Return whether a durable cursor retains unread entries: the pipeline's, or the source's
        own.
        """
        return bool(self._options.pinned_by or self._options.subscription)

    def begin(self, name: str, came_later: bool) -> None:
        """Create the cursors on a topic partition, so that the broker retains it from its first
        entry on.

        Args:
            came_later: whether the topic partition was not there when the planner began. The
                driver, which acquires its cursors before that, has none on it. If a topic is
                deleted and created again, its cursor is gone too.
        """
        if self._options.pinned_by and (came_later or name not in self._options.starting_by_topic):
            self._make(name, self._options.pinned_by, came_later)
        if self._options.subscription:
            cursor = DurableCursor(self._cluster, name, self._options.subscription)
            # The other topic partitions do not wait for one that came later: it is tried again. If
            # there is no topic now, the first acknowledgement after it is back creates the cursor.
            with contextlib.suppress(TopicNotFoundError):
                (cursor.try_to_open if came_later else cursor.ensure)(from_earliest=True)
            self._cursors[name] = cursor

    def _make(self, name: str, subscription: str, came_later: bool) -> None:
        """Create the pipeline's cursor on a topic partition.

        The driver has cursors on the topic partitions that were there at its start. It learns of a
        new one with the first batch, when a broker without a cursor may have removed entries
        already.
        """
        cursor = DurableCursor(self._cluster, name, subscription)
        with contextlib.suppress(ConsumerBusyError, TopicNotFoundError):
            (cursor.try_to_open if came_later else cursor.make)(from_earliest=True)
            cursor.close()

    def position(self, name: str) -> Position | None:
        """Return the position of a topic partition's cursor; None if there is none."""
        cursor = self._cursors.get(name)
        return None if cursor is None else position_of(self._cluster, cursor)

    def advance(self, ends: Offset) -> None:
        """Acknowledge everything up to some positions."""
        for name, cursor in self._cursors.items():
            if name in ends:
                with contextlib.suppress(TopicNotFoundError):
                    cursor.advance(ends[name].position)

    def forget(self, name: str) -> None:
        """Drop the cursor of a topic partition that is not read any more; it stays on the broker,
        if the topic does.
        """
        cursor = self._cursors.pop(name, None)
        if cursor is not None:
            with contextlib.suppress(LedgerlakeError):
                cursor.close()

    def with_pins(self, spans: list[EntryRange]) -> list[EntryRange]:
        """Return the ranges, each with the position from which a durable cursor has retained its
        entries.

        A range that begins after an entry with an index needs it too: the next entry may have no
        index. Behind a position that was gone when the read began, no cursor has retained anything.
        If the pipeline's cursors were moved, the driver passes that to the tasks (see ``loss``).
        """
        return [replace(span, pinned_from=self._pin_of(span)) for span in spans]

    def _pin_of(self, span: EntryRange) -> Position | None:
        if span.was_gone:
            return None
        cursor = self._cursors.get(span.topic_partition)
        if cursor is not None and span.crosses:
            with contextlib.suppress(TopicNotFoundError):
                return moved_to(position_of(self._cluster, cursor), span.after)
        return BEFORE_ALL if cursor is not None or self._options.pinned_by else None


def position_of(cluster: Cluster, cursor: DurableCursor) -> Position:
    """Return the position of a cursor. If the broker cannot tell it and sends nothing, the cursor
    has passed all that the topic can send.
    """
    position = cursor.position()
    return position if position is not None else end_position(cluster, cursor.topic_partition)
