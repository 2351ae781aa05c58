"""The one error tree: whose fault it is, whether to try again, whether data was lost.

    LedgerlakeError
    ├── UsageError               the caller's words: an option, a configuration key        exit 2
    ├── SetupError               this machine: no Java, no broker, a path not writable     exit 2
    ├── TransportError           the network or a broker that is not there; retryable      exit 3
    │   └── DeadlineError        an answer did not come in time
    ├── ProtocolError            the peer sent bytes that break the protocol               exit 3
    │   ├── FrameTooLargeError   a length over the limit; framing is lost
    │   └── MalformedFrameError  a frame or command that does not parse
    ├── BrokerError              the broker understood and said no; ``code`` is its word   exit 2; 3
    │   │                        if it may say yes later
    │   ├── TopicNotFoundError   never created by us
    │   └── ConsumerBusyError    somebody else holds the exclusive subscription
    ├── CorruptEntryError        one entry's bytes; it becomes a row in ``rejects``
    ├── DecryptionError          no key opens an entry, and that must not be               exit 2
    ├── DataLossError            messages went before they were read, and that must not be  exit 1
    ├── OffsetError              a checkpoint or offset that this version cannot read      exit 2
    ├── CheckpointError          checkpoint and table do not belong together               exit 2
    ├── OwnershipError           another process runs this stream                          exit 2
    ├── ProducerNameError        another producer used the name of this one                exit 2
    ├── ProcessLostError         a process of Spark's was ended from outside; retryable    exit 3
    └── TableError               the table is not what the contract says                   exit 2
        └── TableAccessError     it cannot be read or written now; retryable               exit 3

Each error is one sentence: what, where, what to do. ``retryable`` says whether the same call may
succeed later, ``lost`` whether data is gone: "no", "unknown" or "yes". All of them survive
pickling, since they cross between Spark's processes.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from ledgerlake.reasons import MALFORMED_ENTRY, Reason

Lost = Literal["no", "unknown", "yes"]

# Of a longer message the middle is left out: it has names and texts from outside.
_MESSAGE_CHARACTERS = 4000
_HALF_CHARACTERS = _MESSAGE_CHARACTERS // 2 - 5

# A message is one line: a line of such a text would look like an error of its own. It is UTF-8, as
# rejects are: a JSON text may have half of a surrogate pair.
_ESCAPED = re.compile("[\n\v\f\r\x1c-\x1e\x85\u2028\u2029\ud800-\udfff]")


class LedgerlakeError(Exception):
    """Base of the tree; never raised itself."""

    retryable: ClassVar[bool] = False
    lost: ClassVar[Lost] = "no"
    exit_code: int = 3

    def __init__(self, message: str, **attributes: Any) -> None:
        message = _ESCAPED.sub(lambda match: ascii(match[0])[1:-1], message)
        if len(message) > _MESSAGE_CHARACTERS:
            message = f"{message[:_HALF_CHARACTERS]} ... {message[-_HALF_CHARACTERS:]}"
        super().__init__(message)
        self.message = message
        self.attributes = attributes
        self.__dict__.update(attributes)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.attributes)


def _rebuild(
    cls: type[LedgerlakeError], message: str, attributes: dict[str, Any]
) -> LedgerlakeError:
    return cls(message, **attributes)


class UsageError(LedgerlakeError):
    """An option or a configuration key is wrong; nothing was started."""

    exit_code = 2


class SetupError(LedgerlakeError):
    """This machine lacks something that we need; the message says what to install or change."""

    exit_code = 2


class TransportError(LedgerlakeError):
    """The broker cannot be reached or went away; the same call may succeed later."""

    retryable = True


class DeadlineError(TransportError):
    """The peer is there but did not answer before the deadline."""


class ProtocolError(LedgerlakeError):
    """The peer broke the protocol. A fresh connection may do better, so it is worth a bounded
    retry.
    """

    retryable = True


class FrameTooLargeError(ProtocolError):
    """A frame's length passes the limit; where the next frame starts is unknown.

    ``is_command`` says that it is a command without payload.
    """

    is_command: bool = False


class MalformedFrameError(ProtocolError):
    """A frame or the command inside does not parse."""


class BrokerError(LedgerlakeError):
    """The broker answered with an error; ``code`` is the protocol's name for it."""

    code: str = "UnknownError"

    def __init__(self, message: str, **attributes: Any) -> None:
        super().__init__(message, **attributes)
        # The broker takes a process that has vanished for connected for a while.
        self.exit_code = 3 if self.may_retry or self.code == ConsumerBusyError.code else 2

    @property
    def may_retry(self) -> bool:
        """Return whether this answer is worth a retry with a fresh lookup."""
        return BROKER_CODES.get(self.code, (False, ""))[0]


class TopicNotFoundError(BrokerError):
    """The topic does not exist. We never create one."""

    code = "TopicNotFound"


class ConsumerBusyError(BrokerError):
    """An exclusive subscription is held by somebody else."""

    code = "ConsumerBusy"


class CorruptEntryError(LedgerlakeError):
    """A stored entry that cannot become messages; ``reason`` is the word that goes into
    ``rejects``.
    """

    reason: Reason = MALFORMED_ENTRY


class DecryptionError(LedgerlakeError):
    """An entry is encrypted for somebody else, and the user wants to be stopped by that."""

    exit_code = 2


class DataLossError(LedgerlakeError):
    """A topic has lost entries that were not read yet, and the options do not allow a loss."""

    lost = "yes"
    exit_code = 1


class OffsetError(LedgerlakeError):
    """An offset or checkpoint of a version or shape that this release cannot read."""

    exit_code = 2


class CheckpointError(LedgerlakeError):
    """The checkpoint is incomplete, older than the table, or belongs to another stream; the table
    was not changed.
    """

    exit_code = 2


class OwnershipError(LedgerlakeError):
    """Another process has taken over the stream; this one must not write any more."""

    exit_code = 2


class ProducerNameError(LedgerlakeError):
    """Another producer has used the name of this one, so the broker drops messages of this one."""

    exit_code = 2


class ProcessLostError(LedgerlakeError):
    """A process that the query needs was ended from outside: by hand, or because memory ran out; or
    an executor was lost, and its task, run again, found other messages. A new start goes on from
    there.
    """

    retryable = True


def refuse_newer(written: str, version: int, known: int, number: str = "version") -> None:
    """Check that a version is not of a newer release.

    Args:
        written: the name of the object, for the error.
        number: the name of the version, for the error.

    Raises:
        OffsetError: the version is above the last that is known.
    """
    if version > known:
        raise OffsetError(
            f"{written} was written by a newer Ledgerlake ({number} {version}, this one reads up "
            f"to {known}); upgrade Ledgerlake"
        )


class TableError(LedgerlakeError):
    """The table cannot be used: it has another schema, or features or properties that do
    not fit.
    """

    exit_code = 2


class TableAccessError(TableError):
    """The table cannot be read or written now: its store does not answer or refuses, or other
    writers were there first.
    """

    retryable = True
    exit_code = 3


# Whether a code of the broker (``ServerError``) passes with time, and why.
BROKER_CODES = {
    "UnknownError": (True, "the broker failed, and does not say at what"),
    "MetadataError": (True, "the metadata store, or an entry there, cannot be read now"),
    "PersistenceError": (True, "the bookies cannot store or read now"),
    "AuthenticationError": (False, "the credentials are not accepted until somebody changes them"),
    "AuthorizationError": (False, "the role lacks a permission until somebody grants it"),
    "ConsumerBusy": (
        False,
        "another consumer holds the subscription; a call that waits for its end tries again",
    ),
    "ServiceNotReady": (True, "the topic is being loaded or moved; it is looked up again"),
    "ProducerBlockedQuotaExceededError": (
        True,
        "the topic's backlog is over its quota (`producer_request_hold`) until consumers catch up",
    ),
    "ProducerBlockedQuotaExceededException": (
        True,
        "the topic's backlog is over its quota (`producer_exception`) until consumers catch up",
    ),
    "ChecksumError": (
        False,
        "an entry was damaged on its way; later ones may be stored, and a broker that deduplicates "
        "would drop it if it came after them",
    ),
    "UnsupportedVersionError": (False, "the broker lacks the feature until it is upgraded"),
    "TopicNotFound": (False, "no topic is created"),
    "SubscriptionNotFound": (False, "somebody has removed the subscription"),
    "ConsumerNotFound": (True, "the broker has closed the consumer; another one is opened"),
    "TooManyRequests": (True, "the broker has too many lookups at once"),
    "TopicTerminatedError": (False, "the topic takes no message any more"),
    "ProducerBusy": (
        True,
        "the broker has not noticed yet that a producer of this name lost its connection, or the "
        "topic has its most producers",
    ),
    "InvalidTopicName": (False, "no topic can have that name"),
    "IncompatibleSchema": (False, "the topic takes no such messages until its schema changes"),
    "ConsumerAssignError": (False, "no key-shared consumer is opened here"),
    "TransactionCoordinatorNotFound": (False, "no transaction is begun here"),
    "InvalidTxnStatus": (False, "no transaction is begun here"),
    "NotAllowedError": (False, "a policy or the broker's configuration forbids the request"),
    "TransactionConflict": (False, "no transaction is begun here"),
    "TransactionNotFound": (False, "no transaction is begun here"),
    "ProducerFenced": (False, "a producer has taken the topic for itself alone"),
}


def is_retryable(error: BaseException) -> bool:
    """Return whether the call that raised ``error`` may succeed when tried again."""
    if isinstance(error, BrokerError):
        return error.may_retry
    return isinstance(error, LedgerlakeError) and error.retryable
