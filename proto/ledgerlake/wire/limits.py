"""The limit of every size and count that the other side announces.

Pulsar's own default message size is 5 MiB, and its frame decoder allows 10 KiB above it
(``Commands.MESSAGE_SIZE_FRAME_PADDING``). A broker may have a larger message size and announces it
in CONNECTED.
"""

DEFAULT_MAX_MESSAGE_BYTES = 5 * 1024 * 1024
FRAME_PADDING_BYTES = 10 * 1024

# A broker may announce any size; this is the largest accepted size of one frame.
MAX_MESSAGE_BYTES_CAP = 128 * 1024 * 1024

# The unread entries of one connection, beside one of each consumer. Planners of limited batches
# keep half of that from one batch to the next.
MAX_UNREAD_BYTES = 128 * 1024 * 1024

# The topics of a namespace come as one command, to which a broker's message size does not apply:
# 100,000 names of 300 bytes.
MAX_COMMAND_BYTES = 32 * 1024 * 1024

# The command of a MESSAGE contains ids. The compiled scan does not handle a longer one.
MAX_SCANNED_COMMAND_BYTES = 1024 * 1024

MAX_LOOKUP_HOPS = 20
MAX_PARTITIONS = 100_000

# The last millisecond that counts as a time, 9999-12-30T23:59:59.999Z; the first is 0. Python's
# datetime, Arrow's conversion to it, Spark and Delta hold all of these, also as local time in every
# time zone.
MAX_TIME_MS = 253_402_214_399_999

# No producer makes a larger batch; its rows would take far more memory than its bytes.
MAX_BATCH_MESSAGES = 1_000_000

# The largest metadata of an entry, and of a message in a batch: its properties have six bytes at
# least, and take far more as objects.
MAX_MESSAGE_METADATA_BYTES = 8 * 1024 * 1024

# Decoding an entry allocates at most this many times its bytes, stored and plain together, and in
# addition ten pieces of rows: one that is held, one that is made, Python objects of unusual
# messages, and memory that allocators keep of earlier ones. Plain bytes have their own limit
# (``maxUncompressedBytes``), against which the size in an entry is checked.
DECODING_FACTOR = 32
DECODED_PIECE_BYTES = 32 * 1024 * 1024

# The most bytes that the values of one message take when they are decoded by a schema, as
# ``decode.weights`` counts them before it decodes: a message with more becomes a reject. No more
# are decoded at once, either. Its own texts and bytes are not counted: ``maxUncompressedBytes``
# limits them. Decoding takes at most twice these bytes, and ``DECODING_FACTOR`` times the message.
MAX_VALUES_BYTES = 256 * 1024 * 1024

# The largest plain entry or large message, whatever the options allow: the offsets in a column of
# Arrow have 32 bits.
MAX_PLAIN_BYTES = 2**31 - 64 * 1024 * 1024

# A chunk of a message with more chunks, or a marker that lists more, becomes a reject.
MAX_CHUNKS = 10_000

# The most chunks of the incomplete messages of a topic partition together, with bytes or without:
# each micro-batch of the topic partition reads and holds their positions.
MAX_INCOMPLETE_CHUNKS = 100_000

# The limit of the producer name and of the uuid of a chunk or of a marker. Both are kept for every
# incomplete message.
MAX_CHUNK_NAME_BYTES = 1024

# The limit of the JSON in which one task passes on large messages, as one value of Arrow. Messages
# beyond it become rejects.
MAX_TASK_EVENT_BYTES = 256 * 1024 * 1024

# The limit of the events of schedules that one task passes on: 48 bytes and the id for each
# message. Messages beyond it become rejects.
MAX_TASK_SCHEDULE_BYTES = 256 * 1024 * 1024

# The limit of cancels by key or message id that one task passes on, and of the bytes of the ids and
# keys in them.
# The entries of cancels beyond it become rejects.
MAX_TASK_CANCELS = 20_000
MAX_TASK_CANCEL_BYTES = 4 * 1024 * 1024

# The most entries of a map that a query of a table gets. DuckDB compares the keys of a map by a
# hash without a secret: its work may grow with the square of their number.
MAX_QUERY_MAP_ENTRIES = 1000

# The longest id of a schedule.
MAX_SCHEDULE_CHARACTERS = 200

# The longest cron expression, and the most occurrences that a repeating message may ask for.
MAX_CRON_CHARACTERS = 200
MAX_OCCURRENCES = 1_000_000_000


def message_limit_bytes(announced: int | None) -> int:
    """Return the largest message of a peer by the size that it announced; the default if that is
    None or not usable.
    """
    return min(
        announced if announced and announced > 0 else DEFAULT_MAX_MESSAGE_BYTES,
        MAX_MESSAGE_BYTES_CAP,
    )


def frame_limit_bytes(max_message_bytes: int | None) -> int:
    """Return the largest accepted frame of a peer by the ``max_message_bytes`` that it announced;
    by the default if that is None or not usable.
    """
    return message_limit_bytes(max_message_bytes) + FRAME_PADDING_BYTES
