"""Maps of Protobuf messages.

On the wire a map is a repeated message with a key and a value: the descriptor's option
``map_entry`` makes a map of it. Protobuf's compiler sets that option only for such messages, and
its library for C++ refuses all others. The library for Python takes the option on trust, reads
memory by it that is no map, and so ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf.descriptor import FieldDescriptor

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

_T = FieldDescriptor
_KEYS = {
    *(_T.TYPE_INT32, _T.TYPE_INT64, _T.TYPE_UINT32, _T.TYPE_UINT64, _T.TYPE_SINT32, _T.TYPE_SINT64),
    *(_T.TYPE_FIXED32, _T.TYPE_FIXED64, _T.TYPE_SFIXED32, _T.TYPE_SFIXED64, _T.TYPE_BOOL),
    _T.TYPE_STRING,
}


def is_map(field: Any) -> bool:
    """Return whether a field is a map."""
    return field.message_type is not None and _is_entry(field.message_type)


def check_map_entries(root: Descriptor) -> None:
    """Check each map of a message, and of all messages in it, by the rules of Protobuf's compiler.

    Raises:
        ValueError: a message with the option ``map_entry`` is no entry of a map.
    """
    if _is_entry(root):
        raise ValueError(f"{root.full_name} is an entry of a map, and no message of its own")
    seen = {root.full_name}
    waiting: list[Any] = [root]
    while waiting:
        for field in waiting.pop().fields:
            if is_map(field) and not _is_right(field):
                raise ValueError(f"{field.message_type.full_name} is no entry of a map")
            inner = field.message_type
            if inner is not None and inner.full_name not in seen:
                seen.add(inner.full_name)
                waiting.append(inner)


def _is_entry(message: Any) -> bool:
    return bool(message.GetOptions().map_entry)


def _is_right(field: Any) -> bool:
    entry = field.message_type
    parts = [(part.name, part.number, part.is_repeated, part.is_required) for part in entry.fields]
    return (
        field.type == _T.TYPE_MESSAGE
        and field.is_repeated
        and field.containing_oneof is None
        and entry.containing_type == field.containing_type
        and parts == [("key", 1, False, False), ("value", 2, False, False)]
        and not entry.oneofs
        and not entry.extension_ranges
        and entry.fields_by_name["key"].type in _KEYS
        and entry.fields_by_name["value"].type != _T.TYPE_GROUP
    )
