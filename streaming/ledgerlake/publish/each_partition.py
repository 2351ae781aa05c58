"""Sends the same message to several topic partitions, and goes on after one has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ledgerlake.errors import LedgerlakeError, UsageError, is_retryable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_Answer = TypeVar("_Answer")

# The most topic partitions that an error names.
_NAMED_MOST = 5


def send_to_each(topic_partitions: Sequence[str], send: Callable[[str], _Answer]) -> list[_Answer]:
    """Call ``send`` with each topic partition, also after it failed with one; return the answers.

    Raises:
        UsageError: ``send`` raised it; the rest would fail alike and is not tried. LedgerlakeError:
        some topic partitions failed, and the message names them. The error is one that
            may pass if any of theirs is.
    """
    answers: list[_Answer] = []
    failures: dict[str, LedgerlakeError] = {}
    for name in topic_partitions:
        try:
            answers.append(send(name))
        except UsageError:
            raise
        except LedgerlakeError as error:
            failures[name] = error
    if failures:
        raise _together(failures, len(topic_partitions))
    return answers


def _together(failures: dict[str, LedgerlakeError], asked: int) -> LedgerlakeError:
    errors = sorted(failures.values(), key=is_retryable)
    if asked == 1:
        return errors[0]
    named = [f"{name} ({error.message})" for name, error in failures.items()][:_NAMED_MOST]
    more = f" and {len(failures) - len(named)} more" if len(failures) > len(named) else ""
    others = ", and the others did" if len(failures) < asked else ""
    return type(errors[-1])(
        f"{len(failures)} of {asked} topic partitions did not store the message{others}: "
        f"{', '.join(named)}{more}",
        **errors[-1].attributes,
    )
