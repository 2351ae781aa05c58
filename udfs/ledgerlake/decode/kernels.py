"""Loops over bytes, compiled: frames, entry metadata and batches of one buffer, without an object
per message.

The kernels accept plain, well-formed entries. An odd entry is only marked ``ODD``: it has a length
that passes the end, a field of another wire type, text that is not UTF-8, a chunk, a marker or
encryption. The protobuf route in ``reference`` decides about it. So there is one place that judges
bad input, and these loops need to be right only about the entries that they accept. Fields that the
protocol may gain later are skipped, as protobuf does.

Every read is bounded by an ``end`` that lies inside the buffer; a reader that fails returns
position -1.

Wire facts: protobuf tags are ``field << 3 | wire type`` (0 varint, 1 eight bytes, 2 sized, 5 four
bytes); frame, entry and batch lengths are big-endian u32 (see ``wire.framing`` and ``wire.entry``);
a batch is a run of ``[size u32][SingleMessageMetadata][payload_size bytes]``.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ledgerlake.decode.field_numbers import (
    BROKER_BROKER_TIMESTAMP,
    BROKER_INDEX,
    COMMAND_ACK_SET,
    COMMAND_CONSUMER_EPOCH,
    COMMAND_CONSUMER_ID,
    COMMAND_MESSAGE_ID,
    COMMAND_REDELIVERY_COUNT,
    ENTRY_COMPRESSION,
    ENTRY_DELIVER_AT_TIME,
    ENTRY_EVENT_TIME,
    ENTRY_HIGHEST_SEQUENCE_ID,
    ENTRY_NULL_PARTITION_KEY,
    ENTRY_NULL_VALUE,
    ENTRY_NUM_MESSAGES_IN_BATCH,
    ENTRY_ORDERING_KEY,
    ENTRY_PARTITION_KEY,
    ENTRY_PARTITION_KEY_B64_ENCODED,
    ENTRY_PRODUCER_NAME,
    ENTRY_PROPERTIES,
    ENTRY_PUBLISH_TIME,
    ENTRY_REPLICATE_TO,
    ENTRY_REPLICATED_FROM,
    ENTRY_SCHEMA_VERSION,
    ENTRY_SEQUENCE_ID,
    ENTRY_TXNID_LEAST_BITS,
    ENTRY_TXNID_MOST_BITS,
    ENTRY_UNCOMPRESSED_SIZE,
    FIXED32,
    FIXED64,
    ID_BATCH_INDEX,
    ID_BATCH_SIZE,
    ID_ENTRY_ID,
    ID_LEDGER_ID,
    ID_PARTITION,
    PROPERTY_KEY,
    PROPERTY_VALUE,
    SINGLE_COMPACTED_OUT,
    SINGLE_EVENT_TIME,
    SINGLE_NULL_PARTITION_KEY,
    SINGLE_NULL_VALUE,
    SINGLE_ORDERING_KEY,
    SINGLE_PARTITION_KEY,
    SINGLE_PARTITION_KEY_B64_ENCODED,
    SINGLE_PAYLOAD_SIZE,
    SINGLE_PROPERTIES,
    SINGLE_SEQUENCE_ID,
    SIZED,
    VARINT,
)
from ledgerlake.wire.limits import (
    MAX_BATCH_MESSAGES,
    MAX_MESSAGE_METADATA_BYTES,
    MAX_SCANNED_COMMAND_BYTES,
    MAX_TIME_MS,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Matrix = NDArray[np.int64]

F = TypeVar("F", bound="Callable[..., Any]")

_functions: list[Callable[..., Any]] = []
_lock = threading.Lock()
_is_kept: bool | None = None


def compiled(function: F) -> F:
    """Compile the function when a kernel is first called, and keep the machine code (see
    ``kernel_cache``).

    numba is imported only then, which takes half a second: planners decode nothing.
    """

    @functools.wraps(function)
    def compile_and_call(*arguments: Any) -> Any:
        _compile_all()
        return globals()[function.__name__](*arguments)

    _functions.append(function)
    return compile_and_call  # type: ignore[return-value]


def is_kept() -> bool:
    """Return whether machine code is kept. If there is no folder for it that nobody else can write
    to, each process compiles it again.
    """
    return _compile_all()


def _compile_all() -> bool:
    """Replace the functions of this module by compiled ones, once; return whether their machine
    code is kept. One kernel calls another by its name in this module.
    """
    global _is_kept  # noqa: PLW0603
    with _lock:
        if _is_kept is None:
            from numba import njit

            from ledgerlake.decode.kernel_cache import keep

            try:
                kernels = keep(_functions)
                _is_kept = True
            except RuntimeError:
                kernels = [njit(nogil=True)(one) for one in _functions]
                _is_kept = False
            globals().update(
                {one.__name__: kernel for one, kernel in zip(_functions, kernels, strict=True)}
            )
        return _is_kept


OK = 0
ODD = 1

NONE = -(2**62)  # "absent", in every column where a real value cannot be this

# So many properties of a message are compared with each other.
COMPARED_PROPERTIES = 16

# Columns of an entry row.
(
    E_START, E_END, E_LEDGER, E_ENTRY,
    E_BROKER_TIME, E_BROKER_INDEX,
    E_CRC, E_BODY, E_METADATA, E_PAYLOAD,
    E_PRODUCER, E_PRODUCER_SIZE, E_SEQUENCE, E_PUBLISH,
    E_KEY, E_KEY_SIZE, E_KEY_BASE64, E_ORDERING, E_ORDERING_SIZE,
    E_COMPRESSION, E_UNCOMPRESSED, E_BATCH, E_EVENT,
    E_SCHEMA, E_SCHEMA_SIZE, E_DELIVER, E_NULL, E_PROPERTIES, E_TRANSACTION,
    E_PLAIN, E_PLAIN_END,
    ENTRY_COLUMNS,
) = range(32)  # fmt: skip

# Fields of a message. Their matrix has a row for each field and a column for each message, since
# the columns of a table are made of it.
(
    M_ENTRY, M_BATCH_INDEX, M_VALUE, M_VALUE_SIZE,
    M_KEY, M_KEY_SIZE, M_KEY_BASE64, M_ORDERING, M_ORDERING_SIZE,
    M_EVENT, M_SEQUENCE, M_NULL, M_BROKER_INDEX,
    M_PROPERTIES, M_REGION, M_REGION_END, M_PROPERTY_FIELD,
    MESSAGE_FIELDS,
) = range(18)  # fmt: skip

_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
_LAST_FIELD = 2**29 - 1

# Numbers from here on are not in our .proto files.
FIRST_UNKNOWN_BROKER_FIELD = 3
FIRST_UNKNOWN_METADATA_FIELD = 32
FIRST_UNKNOWN_SINGLE_FIELD = 11


@compiled
def read_u32(buffer, position):  # type: ignore[no-untyped-def]
    return (
        (np.int64(buffer[position]) << 24)
        | (np.int64(buffer[position + 1]) << 16)
        | (np.int64(buffer[position + 2]) << 8)
        | np.int64(buffer[position + 3])
    )


@compiled
def read_varint(buffer, position, end):  # type: ignore[no-untyped-def]
    """Value and next position. Values over 63 bits and overlong forms are left to the reference
    (position -1).
    """
    value = np.int64(0)
    shift = 0
    while position < end and shift < 63:
        byte = np.int64(buffer[position])
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return np.int64(0), -1


@compiled
def read_short_varint(buffer, position, end):  # type: ignore[no-untyped-def]
    """As ``read_varint``, of a tag or a length: of more than five bytes, protobuf takes neither."""
    return read_varint(buffer, position, min(end, position + 5))


@compiled
def skip_field(buffer, position, end, wire_type):  # type: ignore[no-untyped-def]
    """The position after a field's value, -1 if it does not fit."""
    if wire_type == VARINT:
        stop = min(position + 10, end)  # a negative number takes ten bytes
        while position < stop:
            position += 1
            if buffer[position - 1] < 0x80:
                return position
        return -1
    if wire_type == SIZED:
        size, position = read_short_varint(buffer, position, end)
        if position < 0 or size > end - position:
            return -1
        return position + size
    if wire_type == FIXED64:
        return position + 8 if end - position >= 8 else -1
    if wire_type == FIXED32:
        return position + 4 if end - position >= 4 else -1
    return -1


@compiled
def is_unknown(tag, first_unknown_field):  # type: ignore[no-untyped-def]
    """Return whether a field is newer than what we know, and of a kind that can be skipped."""
    return first_unknown_field <= tag >> 3 <= _LAST_FIELD and (tag & 7) in (
        VARINT,
        FIXED64,
        SIZED,
        FIXED32,
    )


@compiled
def is_utf8(buffer, position, end):  # type: ignore[no-untyped-def]
    while position < end:
        byte = buffer[position]
        if byte < 0x80:
            position += 1
            continue
        if 0xC2 <= byte <= 0xDF:
            extra, low, high = 1, 0x80, 0xBF
        elif 0xE0 <= byte <= 0xEF:
            extra = 2
            low = 0xA0 if byte == 0xE0 else 0x80
            high = 0x9F if byte == 0xED else 0xBF
        elif 0xF0 <= byte <= 0xF4:
            extra = 3
            low = 0x90 if byte == 0xF0 else 0x80
            high = 0x8F if byte == 0xF4 else 0xBF
        else:
            return False
        if end - position <= extra or not low <= buffer[position + 1] <= high:
            return False
        for offset in range(2, extra + 1):
            if buffer[position + offset] & 0xC0 != 0x80:
                return False
        position += extra + 1
    return True


@compiled
def read_property(buffer, position, end):  # type: ignore[no-untyped-def]
    """A KeyValue: key start, key size, value start, value size; key start -1 if it is not plain."""
    key = value = np.int64(-1)
    key_size = value_size = np.int64(0)
    while position < end:
        tag, position = read_short_varint(buffer, position, end)
        if position < 0 or tag not in (PROPERTY_KEY << 3 | SIZED, PROPERTY_VALUE << 3 | SIZED):
            return np.int64(-1), np.int64(0), np.int64(0), np.int64(0)
        size, position = read_short_varint(buffer, position, end)
        if position < 0 or size > end - position or not is_utf8(buffer, position, position + size):
            return np.int64(-1), np.int64(0), np.int64(0), np.int64(0)
        if tag == PROPERTY_KEY << 3 | SIZED:
            key, key_size = np.int64(position), size
        else:
            value, value_size = np.int64(position), size
        position += size
    if key < 0 or value < 0:
        return np.int64(-1), np.int64(0), np.int64(0), np.int64(0)
    return key, key_size, value, value_size


@compiled
def read_message_id(buffer, position, end, plain_only):  # type: ignore[no-untyped-def]
    """Ledger and entry of a MessageIdData, -1 if it lacks them, and the position after it.

    That is -1 if it is broken; with ``plain_only`` also if it has more than partition, batch_index
    and batch_size beside.
    """
    ledger_id = entry_id = np.int64(-1)
    while position < end:
        tag, position = read_short_varint(buffer, position, end)
        if position < 0:
            break
        if tag == ID_LEDGER_ID << 3 | VARINT:
            ledger_id, position = read_varint(buffer, position, end)
        elif tag == ID_ENTRY_ID << 3 | VARINT:
            entry_id, position = read_varint(buffer, position, end)
        elif plain_only and tag not in (
            ID_PARTITION << 3 | VARINT,
            ID_BATCH_INDEX << 3 | VARINT,
            ID_BATCH_SIZE << 3 | VARINT,
        ):
            position = -1
        else:
            position = skip_field(buffer, position, end, tag & 7)
        if position < 0:
            break
    return ledger_id, entry_id, position


@compiled
def read_message_command(buffer, position, end):  # type: ignore[no-untyped-def]
    """Consumer, ledger and entry of a MESSAGE as brokers encode it; a consumer of -1 if it is
    anything else.
    """
    odd = np.int64(-1), np.int64(-1), np.int64(-1)
    # BaseCommand.type = MESSAGE, then BaseCommand.message up to the end.
    if (
        end - position < 4
        or buffer[position] != 8
        or buffer[position + 1] != 9
        or buffer[position + 2] != 74
    ):
        return odd
    size, position = read_short_varint(buffer, position + 3, end)
    if position < 0 or size != end - position:
        return odd
    consumer_id = ledger_id = entry_id = np.int64(-1)
    while position < end:
        tag, position = read_short_varint(buffer, position, end)
        if position < 0:
            return odd
        if tag == COMMAND_CONSUMER_ID << 3 | VARINT:
            consumer_id, position = read_varint(buffer, position, end)
        elif tag == COMMAND_MESSAGE_ID << 3 | SIZED and ledger_id < 0:
            size, position = read_short_varint(buffer, position, end)
            if position < 0 or size > end - position:
                return odd
            ledger_id, entry_id, position = read_message_id(buffer, position, position + size, True)
        elif tag in (
            COMMAND_REDELIVERY_COUNT << 3 | VARINT,
            COMMAND_ACK_SET << 3 | VARINT,
            COMMAND_CONSUMER_EPOCH << 3 | VARINT,
        ):
            position = skip_field(buffer, position, end, VARINT)
        else:
            return odd
        if position < 0:
            return odd
    if ledger_id < 0 or entry_id < 0:
        return odd
    return consumer_id, ledger_id, entry_id


@compiled
def scan_messages(buffer, limit, rows, found):  # type: ignore[no-untyped-def]
    """Return how many complete, plain MESSAGEs stand at the front: of one consumer and ledger, with
    rising entry ids.

    ``rows`` gets entry id, frame end and message count of each; ``found`` the consumer and the
    ledger.
    """
    entry = np.empty(ENTRY_COLUMNS, dtype=np.int64)
    position, row = np.int64(0), 0
    while row < len(rows) and len(buffer) - position >= 8:
        total, command_size = read_u32(buffer, position), read_u32(buffer, position + 4)
        start = position + 8 + command_size
        end = position + 4 + total
        if (
            total > limit
            or end > len(buffer)
            or start > end
            or command_size > MAX_SCANNED_COMMAND_BYTES
        ):
            break
        consumer_id, ledger_id, entry_id = read_message_command(buffer, position + 8, start)
        if consumer_id < 0:
            break
        if row and (
            consumer_id != found[0] or ledger_id != found[1] or entry_id <= rows[row - 1, 0]
        ):
            break
        entry[E_START], entry[E_END] = start, end
        if not read_entry(buffer, entry):
            break
        found[0], found[1] = consumer_id, ledger_id
        rows[row, 0], rows[row, 1], rows[row, 2] = entry_id, end, max(entry[E_BATCH], 1)
        position = end
        row += 1
    return row


@compiled
def count_frames(buffer):  # type: ignore[no-untyped-def]
    position, count = 0, 0
    while len(buffer) - position >= 8:
        position += 4 + read_u32(buffer, position)
        count += 1
    return count


@compiled
def walk_frames(buffer, entries):  # type: ignore[no-untyped-def]
    """Fill start, end, ledger and entry of each frame's entry; the number of frames, or -1 where
    the bundle is broken.
    """
    position, row = np.int64(0), 0
    limit = len(buffer)
    while position < limit:
        if limit - position < 8 or row >= len(entries):
            return -1
        total = read_u32(buffer, position)
        command_size = read_u32(buffer, position + 4)
        end = position + 4 + total
        command, command_end = position + 8, position + 8 + command_size
        if end > limit or command_end > end:
            return -1
        ledger_id = entry_id = np.int64(-1)
        while command < command_end:
            tag, command = read_short_varint(buffer, command, command_end)
            if command < 0:
                return -1
            if tag != 74:  # BaseCommand.message
                command = skip_field(buffer, command, command_end, tag & 7)
                if command < 0:
                    return -1
                continue
            size, command = read_short_varint(buffer, command, command_end)
            if command < 0 or size > command_end - command:
                return -1
            message, message_end = command, command + size
            command = message_end
            while message < message_end:
                tag, message = read_short_varint(buffer, message, message_end)
                if message < 0:
                    return -1
                if tag != 18:  # CommandMessage.message_id
                    message = skip_field(buffer, message, message_end, tag & 7)
                    if message < 0:
                        return -1
                    continue
                size, message = read_short_varint(buffer, message, message_end)
                if message < 0 or size > message_end - message:
                    return -1
                # A repeated message field is merged into the earlier one.
                ledger, entry, message = read_message_id(buffer, message, message + size, False)
                if message < 0:
                    return -1
                ledger_id = ledger if ledger >= 0 else ledger_id
                entry_id = entry if entry >= 0 else entry_id
        if ledger_id < 0 or entry_id < 0:
            return -1
        entries[row, E_START] = command_end
        entries[row, E_END] = end
        entries[row, E_LEDGER] = ledger_id
        entries[row, E_ENTRY] = entry_id
        row += 1
        position = end
    return row


@compiled
def walk_entries(buffer, entries, status):  # type: ignore[no-untyped-def]
    """Read broker metadata, checksum and message metadata of every entry that is not ODD
    already.
    """
    for row in range(len(entries)):
        if status[row] == OK and not read_entry(buffer, entries[row]):
            status[row] = ODD


@compiled
def read_entry(buffer, entry):  # type: ignore[no-untyped-def]
    position, end = entry[E_START], entry[E_END]
    for column in range(E_BROKER_TIME, ENTRY_COLUMNS):
        entry[column] = NONE
    if end - position >= 2 and buffer[position] == 0x0E and buffer[position + 1] == 0x02:
        if end - position < 6:
            return False
        size = read_u32(buffer, position + 2)
        position += 6
        if size > end - position:
            return False
        stop = position + size
        while position < stop:
            tag, position = read_short_varint(buffer, position, stop)
            if position < 0:
                return False
            if tag == BROKER_BROKER_TIMESTAMP << 3 | VARINT:
                entry[E_BROKER_TIME], position = read_varint(buffer, position, stop)
            elif tag == BROKER_INDEX << 3 | VARINT:
                entry[E_BROKER_INDEX], position = read_varint(buffer, position, stop)
            elif is_unknown(tag, FIRST_UNKNOWN_BROKER_FIELD):
                position = skip_field(buffer, position, stop, tag & 7)
            else:
                return False
            if position < 0:
                return False
        if entry[E_BROKER_TIME] > MAX_TIME_MS:
            return False
    if end - position >= 2 and buffer[position] == 0x0E and buffer[position + 1] == 0x01:
        if end - position < 6:
            return False
        entry[E_CRC] = read_u32(buffer, position + 2)
        position += 6
    entry[E_BODY] = position
    if end - position < 4:
        return False
    size = read_u32(buffer, position)
    position += 4
    if size > end - position or size > MAX_MESSAGE_METADATA_BYTES:
        return False
    entry[E_METADATA] = position
    entry[E_PAYLOAD] = position + size
    entry[E_PLAIN], entry[E_PLAIN_END] = position + size, end
    return read_metadata(buffer, entry, position, position + size)


@compiled
def read_metadata(buffer, entry, position, end):  # type: ignore[no-untyped-def]
    entry[E_EVENT] = entry[E_UNCOMPRESSED] = entry[E_COMPRESSION] = 0
    entry[E_KEY_BASE64] = entry[E_NULL] = entry[E_PROPERTIES] = 0
    while position < end:
        tag, position = read_short_varint(buffer, position, end)
        if position < 0:
            return False
        field, wire_type = tag >> 3, tag & 7
        if is_unknown(tag, FIRST_UNKNOWN_METADATA_FIELD):
            position = skip_field(buffer, position, end, wire_type)
            if position < 0:
                return False
        elif wire_type == VARINT:
            value, position = read_varint(buffer, position, end)
            if position < 0:
                return False
            if field == ENTRY_SEQUENCE_ID:
                entry[E_SEQUENCE] = value
            elif field == ENTRY_PUBLISH_TIME:
                entry[E_PUBLISH] = value
            elif field == ENTRY_COMPRESSION:
                entry[E_COMPRESSION] = value
            elif field == ENTRY_UNCOMPRESSED_SIZE:
                entry[E_UNCOMPRESSED] = value
            elif field == ENTRY_NUM_MESSAGES_IN_BATCH:
                entry[E_BATCH] = value
            elif field == ENTRY_EVENT_TIME:
                entry[E_EVENT] = value
            elif field == ENTRY_PARTITION_KEY_B64_ENCODED:
                entry[E_KEY_BASE64] = value
            elif field == ENTRY_DELIVER_AT_TIME:
                entry[E_DELIVER] = value
            elif field == ENTRY_TXNID_MOST_BITS:
                entry[E_TRANSACTION] = value
            elif field == ENTRY_NULL_VALUE:
                entry[E_NULL] = value
            elif field not in (
                ENTRY_TXNID_LEAST_BITS,
                ENTRY_HIGHEST_SEQUENCE_ID,
                ENTRY_NULL_PARTITION_KEY,
            ):
                return False
        elif wire_type == SIZED:
            size, position = read_short_varint(buffer, position, end)
            if position < 0 or size > end - position:
                return False
            if field in (
                ENTRY_PRODUCER_NAME,
                ENTRY_PARTITION_KEY,
                ENTRY_REPLICATED_FROM,
                ENTRY_REPLICATE_TO,
            ) and not is_utf8(buffer, position, position + size):
                return False
            if field == ENTRY_PRODUCER_NAME:
                entry[E_PRODUCER], entry[E_PRODUCER_SIZE] = position, size
            elif field == ENTRY_PROPERTIES:
                if read_property(buffer, position, position + size)[0] < 0:
                    return False
                entry[E_PROPERTIES] += 1
            elif field == ENTRY_PARTITION_KEY:
                entry[E_KEY], entry[E_KEY_SIZE] = position, size
            elif field == ENTRY_SCHEMA_VERSION:
                entry[E_SCHEMA], entry[E_SCHEMA_SIZE] = position, size
            elif field == ENTRY_ORDERING_KEY:
                entry[E_ORDERING], entry[E_ORDERING_SIZE] = position, size
            elif field not in (ENTRY_REPLICATED_FROM, ENTRY_REPLICATE_TO):
                return False
            position += size
        else:
            return False
    return (
        entry[E_PRODUCER] != NONE
        and entry[E_SEQUENCE] != NONE
        and entry[E_PUBLISH] != NONE
        and entry[E_DELIVER] <= MAX_TIME_MS
        and entry[E_COMPRESSION] <= 4
        and entry[E_UNCOMPRESSED] <= _INT32_MAX
        and (entry[E_BATCH] == NONE or 0 < entry[E_BATCH] <= MAX_BATCH_MESSAGES)
        and entry[E_KEY_BASE64] <= 1
        and entry[E_NULL] <= 1
    )


@compiled
def walk_messages(buffer, entries, status, messages):  # type: ignore[no-untyped-def]
    """Fill one column for each message of every OK entry, from its plain payload; return the number
    of columns.

    An entry whose batch is odd becomes ODD and leaves none.
    """
    column = 0
    for index in range(len(entries)):
        if status[index] != OK:
            continue
        entry = entries[index]
        if entry[E_BATCH] == NONE:
            single_message(entry, index, messages[:, column])
            column += 1
            continue
        count = read_batch(buffer, entry, index, messages, column)
        if count < 0:
            status[index] = ODD
        else:
            column += count
    return column


@compiled
def single_message(entry, index, message):  # type: ignore[no-untyped-def]
    message[M_ENTRY] = index
    message[M_BATCH_INDEX] = -1
    message[M_VALUE] = entry[E_PLAIN]
    message[M_VALUE_SIZE] = entry[E_PLAIN_END] - entry[E_PLAIN]
    message[M_KEY], message[M_KEY_SIZE] = entry[E_KEY], entry[E_KEY_SIZE]
    message[M_KEY_BASE64] = entry[E_KEY_BASE64]
    message[M_ORDERING], message[M_ORDERING_SIZE] = entry[E_ORDERING], entry[E_ORDERING_SIZE]
    message[M_EVENT] = entry[E_EVENT]
    message[M_SEQUENCE] = entry[E_SEQUENCE]
    message[M_NULL] = entry[E_NULL]
    message[M_BROKER_INDEX] = entry[E_BROKER_INDEX]
    message[M_PROPERTIES] = entry[E_PROPERTIES]
    message[M_REGION], message[M_REGION_END] = entry[E_METADATA], entry[E_PAYLOAD]
    message[M_PROPERTY_FIELD] = ENTRY_PROPERTIES


@compiled
def read_batch(buffer, entry, index, messages, column):  # type: ignore[no-untyped-def]
    """Fill columns from ``column`` on; how many, or -1 where the batch is odd."""
    position, end = entry[E_PLAIN], entry[E_PLAIN_END]
    count = entry[E_BATCH]
    filled = 0
    for batch_index in range(count):
        if end - position < 4:
            return -1
        size = read_u32(buffer, position)
        position += 4
        if (
            size > end - position
            or size > MAX_MESSAGE_METADATA_BYTES
            or column + filled >= messages.shape[1]
        ):
            return -1
        message = messages[:, column + filled]
        message[M_ENTRY] = index
        message[M_BATCH_INDEX] = batch_index
        message[M_SEQUENCE] = entry[E_SEQUENCE]
        payload_size, compacted_out = read_single_metadata(
            buffer, message, position, position + size
        )
        position += size
        if payload_size < 0 or payload_size > end - position:
            return -1
        message[M_VALUE], message[M_VALUE_SIZE] = position, payload_size
        position += payload_size
        message[M_BROKER_INDEX] = entry[E_BROKER_INDEX]
        # In a transaction, the broker's index counts entries instead of messages.
        if entry[E_BROKER_INDEX] != NONE and entry[E_TRANSACTION] == NONE:
            message[M_BROKER_INDEX] += batch_index + 1 - count
            # The broker counted fewer messages than the batch has, as its producer said.
            if message[M_BROKER_INDEX] < 0:
                message[M_BROKER_INDEX] = NONE
        if not compacted_out:
            filled += 1
    return filled if position == end else -1


@compiled
def read_single_metadata(buffer, message, position, end):  # type: ignore[no-untyped-def]
    """Payload size (-1: odd) and whether the slot was compacted away."""
    message[M_KEY] = message[M_ORDERING] = NONE
    message[M_KEY_SIZE] = message[M_KEY_BASE64] = message[M_ORDERING_SIZE] = 0
    message[M_EVENT] = message[M_NULL] = message[M_PROPERTIES] = 0
    message[M_REGION], message[M_REGION_END] = position, end
    message[M_PROPERTY_FIELD] = SINGLE_PROPERTIES
    payload_size = np.int64(-1)
    compacted_out = False
    while position < end:
        tag, position = read_short_varint(buffer, position, end)
        if position < 0:
            return np.int64(-1), False
        field, wire_type = tag >> 3, tag & 7
        if is_unknown(tag, FIRST_UNKNOWN_SINGLE_FIELD):
            position = skip_field(buffer, position, end, wire_type)
            if position < 0:
                return np.int64(-1), False
        elif wire_type == VARINT:
            value, position = read_varint(buffer, position, end)
            if position < 0:
                return np.int64(-1), False
            if field == SINGLE_PAYLOAD_SIZE:
                payload_size = value
            elif field == SINGLE_COMPACTED_OUT:
                compacted_out = value != 0
            elif field == SINGLE_EVENT_TIME:
                message[M_EVENT] = value
            elif field == SINGLE_PARTITION_KEY_B64_ENCODED:
                message[M_KEY_BASE64] = value
            elif field == SINGLE_SEQUENCE_ID:
                message[M_SEQUENCE] = value
            elif field == SINGLE_NULL_VALUE:
                message[M_NULL] = value
            elif field != SINGLE_NULL_PARTITION_KEY:
                return np.int64(-1), False
        elif wire_type == SIZED:
            size, position = read_short_varint(buffer, position, end)
            if position < 0 or size > end - position:
                return np.int64(-1), False
            if field == SINGLE_PROPERTIES:
                if read_property(buffer, position, position + size)[0] < 0:
                    return np.int64(-1), False
                message[M_PROPERTIES] += 1
            elif field == SINGLE_PARTITION_KEY:
                if not is_utf8(buffer, position, position + size):
                    return np.int64(-1), False
                message[M_KEY], message[M_KEY_SIZE] = position, size
            elif field == SINGLE_ORDERING_KEY:
                message[M_ORDERING], message[M_ORDERING_SIZE] = position, size
            else:
                return np.int64(-1), False
            position += size
        else:
            return np.int64(-1), False
    if message[M_KEY_BASE64] > 1 or message[M_NULL] > 1:
        return np.int64(-1), False
    return payload_size, compacted_out


@compiled
def walk_properties(buffer, messages, spans):  # type: ignore[no-untyped-def]
    """Key start, key size, value start, value size of every property, in message order. Return
    whether a message may have a key twice.
    """
    row = 0
    repeats = False
    for index in range(messages.shape[1]):
        if messages[M_PROPERTIES, index] == 0:
            continue
        first = row
        position, end = messages[M_REGION, index], messages[M_REGION_END, index]
        wanted = messages[M_PROPERTY_FIELD, index] << 3 | 2
        while position < end:
            tag, position = read_short_varint(buffer, position, end)
            if tag != wanted:
                position = skip_field(buffer, position, end, tag & 7)
                continue
            size, position = read_short_varint(buffer, position, end)
            spans[row, 0], spans[row, 1], spans[row, 2], spans[row, 3] = read_property(
                buffer, position, position + size
            )
            position += size
            row += 1
        # Comparing many keys with each other would take quadratic time.
        repeats = (
            repeats or row - first > COMPARED_PROPERTIES or has_equal(buffer, spans, first, row)
        )
    return repeats


@compiled
def has_equal(buffer, spans, first, end):  # type: ignore[no-untyped-def]
    """Whether two of these spans have the same bytes."""
    for one in range(first, end):
        for other in range(first, one):
            size = spans[one, 1]
            if spans[other, 1] != size:
                continue
            place = 0
            while place < size and buffer[spans[one, 0] + place] == buffer[spans[other, 0] + place]:
                place += 1
            if place == size:
                return True
    return False


@compiled
def mark_last(data, offsets, counts, is_last):  # type: ignore[no-untyped-def]
    """Mark the last of equal texts of each message. ``counts`` has how many each message has.

    The texts of a message are sorted: a producer could choose texts for which a hash table takes
    quadratic time. Messages often have the same names, so each begins with the order of the one
    before it.
    """
    most = 0
    for count in counts:
        most = max(most, count)
    order, other = np.empty(most, dtype=np.int64), np.empty(most, dtype=np.int64)
    first = before = 0
    for count in counts:
        own = offsets[first : first + count + 1]
        if count != before:
            for place in range(count):
                order[place] = place
        if not is_in_order(data, own, order):
            sort_texts(data, own, order, other)
        for place in range(1, count):
            difference = difference_of(data, own, order[place - 1], order[place])
            is_last[first + order[place - 1]] = difference != 0
        first, before = first + count, count


@compiled
def is_in_order(data, offsets, order):  # type: ignore[no-untyped-def]
    """Whether the places of texts are sorted already."""
    for place in range(1, len(offsets) - 1):
        if compared(data, offsets, order[place - 1], order[place]) > 0:
            return False
    return True


@compiled
def sort_texts(data, offsets, order, other):  # type: ignore[no-untyped-def]
    """Sort the places of texts by merges; ``other`` is room for as many."""
    count, width = len(offsets) - 1, 1
    while width < count:
        for start in range(0, count, 2 * width):
            middle, end = min(start + width, count), min(start + 2 * width, count)
            left, right = start, middle
            for place in range(start, end):
                is_left = left < middle and (
                    right >= end or compared(data, offsets, order[left], order[right]) < 0
                )
                other[place] = order[left] if is_left else order[right]
                left, right = left + is_left, right + (not is_left)
        order[:count] = other[:count]
        width *= 2


@compiled
def compared(data, offsets, one, other):  # type: ignore[no-untyped-def]
    """Compare two texts, equal ones by their places: below or above 0."""
    difference = difference_of(data, offsets, one, other)
    return difference if difference != 0 else one - other


@compiled
def difference_of(data, offsets, one, other):  # type: ignore[no-untyped-def]
    """Compare two texts, first by their sizes: below 0, above 0, or 0 if they are equal."""
    size = offsets[one + 1] - offsets[one]
    difference = np.int64(size - (offsets[other + 1] - offsets[other]))
    place = 0
    while difference == 0 and place < size:
        difference = np.int64(data[offsets[one] + place]) - np.int64(data[offsets[other] + place])
        place += 1
    return difference


@compiled
def copy(buffer, start, size, out, target):  # type: ignore[no-untyped-def]
    """Both cut out first: if no index can be negative, the loop is one of vector instructions."""
    taken, put = buffer[start : start + size], out[target : target + size]
    for index in range(len(taken)):
        put[index] = taken[index]


@compiled
def gather(buffer, starts, sizes, offsets, out):  # type: ignore[no-untyped-def]
    """Copy spans one after another; ``offsets`` holds where each goes."""
    for row in range(len(starts)):
        if sizes[row] > 0:
            copy(buffer, starts[row], sizes[row], out, offsets[row])


@compiled
def digits(value):  # type: ignore[no-untyped-def]
    count = 1
    while value >= 10:
        value //= 10
        count += 1
    return count


@compiled
def put_number(out, position, value):  # type: ignore[no-untyped-def]
    count = digits(value)
    for index in range(count):
        out[position + count - 1 - index] = 48 + value % 10
        value //= 10
    return position + count


@compiled
def write_message_ids(ledgers, entries, batch_indexes, offsets, out):  # type: ignore[no-untyped-def]
    """``ledger:entry[:batch]`` for every row; the bytes used. ``out`` holds at least 60 bytes a
    row.
    """
    position = same_size = 0
    for row in range(len(ledgers)):
        offsets[row] = position
        if row and ledgers[row] == ledgers[row - 1] and entries[row] == entries[row - 1]:
            copy(out, offsets[row - 1], same_size, out, position)
            position += same_size
        else:
            position = put_number(out, position, ledgers[row])
            out[position] = 58
            position = put_number(out, position + 1, entries[row])
            same_size = position - offsets[row]
        if batch_indexes[row] >= 0:
            out[position] = 58
            position = put_number(out, position + 1, batch_indexes[row])
    offsets[len(ledgers)] = position
    return position


@compiled
def read_little_endian(buffer, position, size):  # type: ignore[no-untyped-def]
    """The bits of a number of fixed size, at most eight bytes."""
    bits = np.int64(0)
    for index in range(size):
        bits |= np.int64(buffer[position + index]) << (8 * index)
    return bits


@compiled
def read_bits(buffer, position, end):  # type: ignore[no-untyped-def]
    """The bits of a varint and the next position, -1 if it has more than 64."""
    bits = np.int64(0)
    shift = 0
    while position < end and shift < 64:
        byte = np.int64(buffer[position])
        position += 1
        bits |= (byte & 0x7F) << shift
        if byte < 0x80:
            return bits, position if shift < 63 or byte < 2 else np.int64(-1)
        shift += 7
    return bits, np.int64(-1)


@compiled
def read_avro_number(buffer, position, end):  # type: ignore[no-untyped-def]
    """An int or a long of Avro and the next position, -1 if it has more than 64 bits."""
    bits, position = read_bits(buffer, position, end)
    return ((bits >> 1) & _INT64_MAX) ^ -(bits & 1), position


# Instructions of a program that reads a record of Avro (see ``avro``).
A_NULLABLE, A_RECORD, A_BOOLEAN, A_INT, A_LONG, A_FIXED_NUMBER, A_BYTES, A_FIXED, A_ENUM = range(9)


@compiled
def walk_avro(buffer, offsets, present, program, values, sizes, valid, ok):  # type: ignore[no-untyped-def]
    """Read a record of each row. An instruction has four numbers: what it is, its column, an
    argument, and where to go on if a nullable is null. A row that is odd is not ``ok``.

    A column has a number for each row: a value, the bits of a floating one, or where its bytes
    begin, with their size in ``sizes``.
    """
    for row in range(len(present)):
        if not present[row]:
            continue
        position, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        step = 0
        while step < len(program):
            instruction, column, argument = program[step, 0], program[step, 1], program[step, 2]
            step += 1
            if instruction == A_RECORD:
                valid[column, row] = 1
                continue
            if instruction == A_FIXED_NUMBER:
                if argument < 0 or end - position < argument:
                    position = np.int64(-1)
                    break
                values[column, row] = read_little_endian(buffer, position, argument)
                position += argument
            elif instruction == A_FIXED:
                if argument < 0 or end - position < argument:
                    position = np.int64(-1)
                    break
                values[column, row], sizes[column, row] = position, argument
                position += argument
            elif instruction == A_BOOLEAN:
                if position >= end or buffer[position] > 1:
                    position = np.int64(-1)
                    break
                values[column, row] = buffer[position]
                position += 1
            else:
                number, position = read_avro_number(buffer, position, end)
                if position < 0:
                    break
                if instruction == A_NULLABLE:
                    if number == argument:
                        step = program[step - 1, 3]
                    elif number != 1 - argument:
                        position = np.int64(-1)
                        break
                    continue
                if instruction == A_BYTES:
                    if number < 0 or number > end - position:
                        position = np.int64(-1)
                        break
                    values[column, row], sizes[column, row] = position, number
                    position += number
                else:
                    if (instruction == A_INT and not -_INT32_MAX - 1 <= number <= _INT32_MAX) or (
                        instruction == A_ENUM and not 0 <= number < argument
                    ):
                        position = np.int64(-1)
                        break
                    values[column, row] = number
            valid[column, row] = 1
        if position == end:
            ok[row] = 1
        else:
            valid[:, row] = 0


# Kinds of fields of a Protobuf message that ``walk_protobuf`` reads (see ``protobuf_loop``).
P_VARINT, P_FIXED32, P_FIXED64, P_BYTES = range(4)


@compiled
def walk_protobuf(buffer, offsets, present, columns, kinds, values, sizes, valid, ok):  # type: ignore[no-untyped-def]
    """Read a message of each row; ``columns`` has the column of each field number, -1 if there is
    none. A row that is odd, for example with a field that comes twice, is not ``ok``.
    """
    for row in range(len(present)):
        if not present[row]:
            continue
        position, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        while 0 <= position < end:
            tag, position = read_short_varint(buffer, position, end)
            number, wire_type = tag >> 3, tag & 7
            if position < 0 or number == 0 or number > _LAST_FIELD:
                position = np.int64(-1)
                break
            column = columns[number] if number < len(columns) else np.int64(-1)
            if column < 0:
                position = np.int64(skip_field(buffer, position, end, wire_type))
                continue
            kind = kinds[column]
            if valid[column, row]:
                position = np.int64(-1)
            elif kind == P_BYTES and wire_type == SIZED:
                size, position = read_short_varint(buffer, position, end)
                if position < 0 or size > end - position:
                    position = np.int64(-1)
                    break
                values[column, row], sizes[column, row] = position, size
                position += size
            elif kind == P_VARINT and wire_type == VARINT:
                values[column, row], position = read_bits(buffer, position, end)
            elif (kind == P_FIXED32 and wire_type == FIXED32) or (
                kind == P_FIXED64 and wire_type == FIXED64
            ):
                width = 4 if kind == P_FIXED32 else 8
                if end - position < width:
                    position = np.int64(-1)
                    break
                values[column, row] = read_little_endian(buffer, position, width)
                position += width
            else:
                position = np.int64(-1)
            valid[column, row] = 1
        if position == end:
            ok[row] = 1
        else:
            valid[:, row] = 0
            values[:, row] = 0
            sizes[:, row] = 0


# Kinds of nodes of a schema that ``weigh_avro`` walks through (see ``avro_weights``).
W_FIXED, W_BOOLEAN, W_NUMBER, W_BYTES, W_UNION, W_RECORD, W_ARRAY, W_MAP = range(8)


@compiled
def weigh_avro(buffer, offsets, nodes, items, depth, limit, weights):  # type: ignore[no-untyped-def]
    """Add the weights of the items of arrays and maps to each row's weight.

    A node has four numbers: its kind; the bytes of a fixed one and the least of a number, else its
    first child in ``items``; the greatest number, or the number of its children; the weight of an
    item. A row whose bytes do not fit is -1. A row that passes the limit is not read to its end.
    """
    stack = np.zeros((depth, 2), np.int64)
    for row in range(len(weights)):
        position, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        stack[0, 0] = stack[0, 1] = 0
        top = 0
        while top >= 0 and position >= 0 and weights[row] <= limit:
            node, done = stack[top, 0], stack[top, 1]
            kind, argument, count, weight = (
                nodes[node, 0],
                nodes[node, 1],
                nodes[node, 2],
                nodes[node, 3],
            )
            child = np.int64(-1)
            if kind == W_RECORD:
                if done < count:
                    stack[top, 1] += 1
                    child = items[argument + done]
            elif kind in (W_ARRAY, W_MAP):
                if done == 0:
                    number, position = read_avro_number(buffer, position, end)
                    if position >= 0 and number < 0:
                        number = -number
                        _, position = read_avro_number(buffer, position, end)
                    # Each item has at least one byte. The least number stays below zero.
                    if position < 0 or not 0 <= number <= end - position:
                        position = np.int64(-1)
                        break
                    weights[row] += number * weight
                    stack[top, 1] = done = number
                if done > 0:
                    stack[top, 1] -= 1
                    child = items[argument]
                    # The end of a block: the next one begins with its count.
                    if kind == W_MAP:
                        size, position = read_avro_number(buffer, position, end)
                        if position < 0 or not 0 <= size <= end - position:
                            position = np.int64(-1)
                            break
                        position += size
            else:
                top -= 1
                if kind == W_FIXED:
                    position = position + argument if argument <= end - position else np.int64(-1)
                    continue
                if kind == W_BOOLEAN:
                    position = (
                        position + 1 if position < end and buffer[position] < 2 else np.int64(-1)
                    )
                    continue
                number, position = read_avro_number(buffer, position, end)
                if position < 0:
                    break
                if kind == W_NUMBER:
                    fits = argument <= number <= count
                elif kind == W_BYTES:
                    fits = 0 <= number <= end - position
                    position += number
                else:
                    fits = 0 <= number < count
                    if fits:
                        top += 1
                        stack[top, 0], stack[top, 1] = items[argument + number], 0
                if not fits:
                    position = np.int64(-1)
                continue
            if child >= 0:
                top += 1
                stack[top, 0], stack[top, 1] = child, 0
            else:
                top -= 1
        if weights[row] <= limit and position != end:
            weights[row] = -1


# Kinds of fields of a message that ``weigh_protobuf`` walks through (see ``protobuf_weights``).
F_SINGLE, F_MESSAGE, F_VARINT, F_FIXED32, F_FIXED64 = range(5)


@compiled
def weigh_protobuf(buffer, offsets, nodes, fields, depth, limit, weights):  # type: ignore[no-untyped-def]
    """Add the weights of repeated fields to each row's weight.

    A node, one for each message at its place in the schema, has its first field, the number of its
    fields and the weight of an unknown field. A field has its number, its kind, the node of its
    message (-1: none) and the weight of each time that it is written. A row that is odd, for
    example one with a group, is -1. A row that passes the limit is not read to its end.
    """
    stack = np.zeros((depth, 2), np.int64)
    for row in range(len(weights)):
        position = np.int64(offsets[row])
        stack[0, 0], stack[0, 1] = 0, offsets[row + 1]
        top = 0
        while top >= 0 and position >= 0 and weights[row] <= limit:
            node, end = stack[top, 0], stack[top, 1]
            if position == end:
                top -= 1
                continue
            tag, position = read_short_varint(buffer, position, end)
            if position < 0:
                break
            number, wire_type = tag >> 3, tag & 7
            low, high = nodes[node, 0], nodes[node, 0] + nodes[node, 1]
            last = high
            while low < high:
                middle = (low + high) // 2
                if fields[middle, 0] < number:
                    low = middle + 1
                else:
                    high = middle
            field = low if low < last and fields[low, 0] == number else np.int64(-1)
            if field < 0:
                weights[row] += nodes[node, 2]
                position = np.int64(skip_field(buffer, position, end, wire_type))
                continue
            kind, child, weight = fields[field, 1], fields[field, 2], fields[field, 3]
            weights[row] += weight
            if wire_type != SIZED or kind == F_SINGLE:
                position = np.int64(skip_field(buffer, position, end, wire_type))
                continue
            size, position = read_short_varint(buffer, position, end)
            if position < 0 or size > end - position:
                position = np.int64(-1)
                break
            if kind == F_MESSAGE:
                top += 1
                stack[top, 0], stack[top, 1] = child, position + size
                continue
            if kind == F_VARINT:
                for place in range(position, position + size):
                    if buffer[place] < 0x80:
                        weights[row] += weight
            else:
                weights[row] += weight * (size // (4 if kind == F_FIXED32 else 8))
            position += size
        if weights[row] <= limit and top >= 0:
            weights[row] = -1


@compiled
def count_json(buffer, offsets, rows, counts):  # type: ignore[no-untyped-def]
    """Count commas, colons, braces and brackets that open, outside of texts, in some rows, and the
    most of those that are open at once.
    """
    for index in range(len(rows)):
        row = rows[index]
        position, end = np.int64(offsets[row]), np.int64(offsets[row + 1])
        commas = colons = braces = brackets = level = deepest = 0
        while position < end:
            byte = buffer[position]
            position += 1
            if byte == 34:  # a quotation mark
                while position < end:
                    byte = buffer[position]
                    position += 2 if byte == 92 else 1  # a backslash
                    if byte == 34:
                        break
            elif byte == 44:
                commas += 1
            elif byte == 58:
                colons += 1
            elif byte in (123, 91):
                braces += byte == 123
                brackets += byte == 91
                level += 1
                deepest = max(deepest, level)
            elif byte in (125, 93):
                level -= 1
        counts[index] = (commas, colons, braces, brackets, deepest)
