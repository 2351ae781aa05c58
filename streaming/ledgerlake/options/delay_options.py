"""What the section ``[delay]`` says, as tasks and the stateful stage take it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.stored.places import Place


@dataclass(frozen=True)
class DelayOptions:
    """The options of delayed messages.

    Args:
        enabled: delayed messages wait; else they are delivered as they come, and only what waits
            already still waits.
        folder: where buckets are kept instead of the state store.
        reread: keep positions only.
        republish: whether there is an output beside the table, and where it begins: ``earliest``
            (everything that waits) or ``latest`` (what is published from now on).
    """

    enabled: bool = True
    folder: Place | None = None
    reread: bool = False
    republish: str | None = None
    settings: DelaySettings = field(default_factory=DelaySettings)
