"""A limit on everything that the other side may claim.

Precedents: Pulsar's own default message size is 5 MiB and its frame decoder allows 10 KiB above it
(``Commands.MESSAGE_SIZE_FRAME_PADDING``); a broker may raise the message size and says so in
CONNECTED.
"""

DEFAULT_MAX_MESSAGE_BYTES = 5 * 1024 * 1024
FRAME_PADDING_BYTES = 10 * 1024

# A broker may announce any size; this is the most that we agree to hold for one frame.
MAX_MESSAGE_BYTES_CAP = 128 * 1024 * 1024

# The topics of a namespace come as one command, which a broker does not hold to its message size:
# 100,000 names of 300 bytes.
MAX_COMMAND_BYTES = 32 * 1024 * 1024

# The command of a MESSAGE carries ids. The compiled scan leaves a longer one to the way of single
# frames.
MAX_SCANNED_COMMAND_BYTES = 1024 * 1024

MAX_LOOKUP_HOPS = 20
MAX_PARTITIONS = 100_000

# The last millisecond that counts as a time, 9999-12-30T23:59:59.999Z; the first is 0. Python's
# datetime, Arrow's conversion to it, Spark and Delta hold all of these, also as local time in every
# time zone.
MAX_TIME_MS = 253_402_214_399_999

# A batch of more is not what any producer makes; expanded rows of it would take more memory than
# its bytes suggest.
MAX_BATCH_MESSAGES = 1_000_000

# Decoding an entry takes at most this many times its bytes, stored and plain together, and beside
# them so many pieces of rows: one that is held, one that is made, Python's objects of odd messages,
# and what allocators keep of those before. Plain bytes have a limit of their own
# (``maxUncompressedBytes``), which an entry's claim of its size is checked against.
DECODING_FACTOR = 32
DECODED_PIECES = 10
DECODED_PIECE_BYTES = 32 * 1024 * 1024

# A chunk of a message that has more chunks is refused, and so is a marker that lists more.
MAX_CHUNKS = 10_000

# The producer name and the uuid of a chunk or of a marker, each; both are kept for every incomplete
# message.
MAX_CHUNK_NAME_BYTES = 1024

# What one task passes on of large messages, in JSON, which is one value of Arrow. What is beyond is
# a reject.
MAX_TASK_EVENT_BYTES = 256 * 1024 * 1024

# Cancels that one task passes on, and the bytes of what they name; the entries of those beyond are
# rejects.
MAX_TASK_CANCELS = 20_000
MAX_TASK_CANCEL_BYTES = 4 * 1024 * 1024


def message_limit_bytes(announced: int | None) -> int:
    """Return the largest message of a peer that announced a size (None or nonsense: the default)."""
    return min(announced if announced and announced > 0 else DEFAULT_MAX_MESSAGE_BYTES, MAX_MESSAGE_BYTES_CAP)


def frame_limit_bytes(max_message_bytes: int | None) -> int:
    """The largest frame to accept from a peer that announced ``max_message_bytes`` (None or
    nonsense: the default).
    """
    return message_limit_bytes(max_message_bytes) + FRAME_PADDING_BYTES
