from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DelayedIndex(_message.Message):
    __slots__ = ("timestamp", "ledger_id", "entry_id")
    TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    timestamp: int
    ledger_id: int
    entry_id: int
    def __init__(self, timestamp: _Optional[int] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class SnapshotSegment(_message.Message):
    __slots__ = ("indexes", "frames", "frame_sizes")
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAME_SIZES_FIELD_NUMBER: _ClassVar[int]
    indexes: _containers.RepeatedCompositeFieldContainer[DelayedIndex]
    frames: bytes
    frame_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, indexes: _Optional[_Iterable[_Union[DelayedIndex, _Mapping]]] = ..., frames: _Optional[bytes] = ..., frame_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class SnapshotSegmentMetadata(_message.Message):
    __slots__ = ("delayed_index_bit_map", "max_schedule_timestamp", "min_schedule_timestamp")
    class DelayedIndexBitMapEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: bytes
        def __init__(self, key: _Optional[int] = ..., value: _Optional[bytes] = ...) -> None: ...
    DELAYED_INDEX_BIT_MAP_FIELD_NUMBER: _ClassVar[int]
    MAX_SCHEDULE_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    MIN_SCHEDULE_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    delayed_index_bit_map: _containers.ScalarMap[int, bytes]
    max_schedule_timestamp: int
    min_schedule_timestamp: int
    def __init__(self, delayed_index_bit_map: _Optional[_Mapping[int, bytes]] = ..., max_schedule_timestamp: _Optional[int] = ..., min_schedule_timestamp: _Optional[int] = ...) -> None: ...

class SnapshotMetadata(_message.Message):
    __slots__ = ("metadata_list", "version")
    METADATA_LIST_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    metadata_list: _containers.RepeatedCompositeFieldContainer[SnapshotSegmentMetadata]
    version: int
    def __init__(self, metadata_list: _Optional[_Iterable[_Union[SnapshotSegmentMetadata, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class SegmentBlock(_message.Message):
    __slots__ = ("segments",)
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, segments: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BlockDirectory(_message.Message):
    __slots__ = ("first_segments", "version")
    FIRST_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    first_segments: _containers.RepeatedScalarFieldContainer[int]
    version: int
    def __init__(self, first_segments: _Optional[_Iterable[int]] = ..., version: _Optional[int] = ...) -> None: ...

class ScheduledMessage(_message.Message):
    __slots__ = ("schedule_id", "ledger_id", "entry_id", "time_ms", "deliver_ms", "repeats")
    SCHEDULE_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_MS_FIELD_NUMBER: _ClassVar[int]
    DELIVER_MS_FIELD_NUMBER: _ClassVar[int]
    REPEATS_FIELD_NUMBER: _ClassVar[int]
    schedule_id: str
    ledger_id: int
    entry_id: int
    time_ms: int
    deliver_ms: int
    repeats: bool
    def __init__(self, schedule_id: _Optional[str] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., time_ms: _Optional[int] = ..., deliver_ms: _Optional[int] = ..., repeats: bool = ...) -> None: ...

class ScheduleBlock(_message.Message):
    __slots__ = ("messages", "version")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ScheduledMessage]
    version: int
    def __init__(self, messages: _Optional[_Iterable[_Union[ScheduledMessage, _Mapping]]] = ..., version: _Optional[int] = ...) -> None: ...

class ScheduleTable(_message.Message):
    __slots__ = ("blocks", "messages", "occurrences_per_day", "bytes_per_day", "hash_key", "version")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    OCCURRENCES_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    HASH_KEY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    messages: int
    occurrences_per_day: int
    bytes_per_day: int
    hash_key: bytes
    version: int
    def __init__(self, blocks: _Optional[int] = ..., messages: _Optional[int] = ..., occurrences_per_day: _Optional[int] = ..., bytes_per_day: _Optional[int] = ..., hash_key: _Optional[bytes] = ..., version: _Optional[int] = ...) -> None: ...
