"""What the section ``[delay]`` says, as tasks and the stateful stage take it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.schedules.repetition import RepetitionLimit
from ledgerlake.stored.places import Place

# A micro-batch that is run again must release the same messages: a release with another number has
# to run unfinished micro-batches with this one.
MOST_DUE = 50_000


@dataclass(frozen=True)
class DelayOptions:
    """The options of delayed messages.

    Args:
        enabled: delayed messages wait; else they are delivered as they come, and only what waits
            already still waits.
        folder: where buckets are kept instead of the state store.
        reread: keep positions only.
        republish: where an output beside the table began: ``earliest`` (with all messages that
            waited then) or ``latest`` (with the messages published from then on); None before that.
            It stays while the output is switched off.
        max_repetitions_per_s, max_repeated_bytes_per_s: of the messages of a topic partition that
            repeat; None without a limit.
        most_due: after so many due messages a micro-batch releases no more of a topic partition.
    """

    enabled: bool = True
    folder: Place | None = None
    reread: bool = False
    republish: str | None = None
    most_due: int = sys.maxsize
    settings: DelaySettings = field(default_factory=DelaySettings)
    max_repetitions_per_s: int | None = None
    max_repeated_bytes_per_s: int | None = None

    @property
    def repetition_limit(self) -> RepetitionLimit:
        """Return the limit of the messages that repeat."""
        return RepetitionLimit(self.max_repetitions_per_s, self.max_repeated_bytes_per_s)
