"""Delta's deletion vectors: which rows of a file are deleted, as Delta's protocol writes them.

A vector is a roaring bitmap of row numbers, in the layout for numbers of 64 bits:

    [u32 1681511377] [u64 bitmaps] then for each [u32 upper bits] [bitmap], little-endian

The vectors of a commit are in one file, ``deletion_vector_<uuid>.bin``:

    [u8 1] then for each vector [u32 size] [vector] [u32 CRC-32 of the vector], big-endian

The log's entry of a data file names the file of its vector by the uuid in Z85, and the offset of
the size.
"""

from __future__ import annotations

import struct
import uuid
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyroaring import BitMap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltalake import DeltaTable
    from numpy.typing import NDArray

    from ledgerlake.stored.places import Place

Descriptor = dict[str, Any]

_MAGIC = struct.Struct("<IQI")
_MAGIC_NUMBER = 1681511377
_SIZE = struct.Struct(">I")
_FORMAT = b"\x01"
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def live_rows(table: DeltaTable) -> dict[str, NDArray[np.bool_]]:
    """Return the masks of the rows that are not deleted, by the names of the files that have a
    vector. A mask may end before the last rows of its file, which are not deleted then.
    """
    vectors = pa.table(table.deletion_vectors())
    return {
        path.rpartition("/")[2]: selection.values.to_numpy(zero_copy_only=False)
        for path, selection in zip(
            vectors["filepath"].to_pylist(), vectors["selection_vector"], strict=True
        )
    }


def live_part(live: NDArray[np.bool_] | None, first: int, count: int) -> NDArray[np.bool_]:
    """Return the mask of some neighbouring rows of a file.

    Args:
        live: the mask by ``live_rows``; None if the file has no vector.
    """
    mask = np.ones(count, dtype=bool)
    if live is not None:
        part = live[first : first + count]
        mask[: len(part)] = part
    return mask


def pack_vectors(vectors: Mapping[str, BitMap]) -> tuple[str, bytes, dict[str, Descriptor]]:
    """Return the name and the content of a file with vectors, and what the log says of each.

    Args:
        vectors: by the names of their data files.
    """
    number = uuid.uuid4()
    parts = [_FORMAT]
    descriptors: dict[str, Descriptor] = {}
    offset = len(_FORMAT)
    for name, vector in vectors.items():
        # Numbers of rows in a file need no more than 32 bits, so there is one bitmap.
        data = _MAGIC.pack(_MAGIC_NUMBER, 1, 0) + vector.serialize()
        descriptors[name] = {
            "storageType": "u",
            "pathOrInlineDv": _z85(number.bytes),
            "offset": offset,
            "sizeInBytes": len(data),
            "cardinality": len(vector),
        }
        parts += [_SIZE.pack(len(data)), data, _SIZE.pack(zlib.crc32(data))]
        offset += len(data) + 2 * _SIZE.size
    return f"deletion_vector_{number}.bin", b"".join(parts), descriptors


def file_of(descriptor: Descriptor) -> str | None:
    """Return the name of the file in which a vector is; None if it is in none that this module
    made.
    """
    if descriptor.get("storageType") != "u" or len(descriptor["pathOrInlineDv"]) != len(
        _z85(bytes(16))
    ):
        return None
    return f"deletion_vector_{uuid.UUID(bytes=_from_z85(descriptor['pathOrInlineDv']))}.bin"


def read_vector(table: Place, descriptor: Descriptor) -> BitMap | None:
    """Return a vector of a table's file; None if it is stored otherwise than this module does it.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    name = file_of(descriptor)
    if name is None:
        return None
    place = table / name
    with place.filesystem().open_input_file(place.root) as file:
        file.seek(descriptor["offset"])
        (size_bytes,) = _SIZE.unpack(file.read(_SIZE.size))
        data, checksum = bytes(file.read(size_bytes)), bytes(file.read(_SIZE.size))
    if checksum != _SIZE.pack(zlib.crc32(data)):
        raise ValueError(f"the deletion vector in {name} is damaged")
    is_own = data[: _MAGIC.size] == _MAGIC.pack(_MAGIC_NUMBER, 1, 0)
    return BitMap.deserialize(data[_MAGIC.size :]) if is_own else None


def _z85(data: bytes) -> str:
    """Return bytes, a multiple of four, as text."""
    text = ""
    for start in range(0, len(data), 4):
        number = int.from_bytes(data[start : start + 4], "big")
        digits = ""
        for _ in range(5):
            number, digit = divmod(number, 85)
            digits = _Z85[digit] + digits
        text += digits
    return text


def _from_z85(text: str) -> bytes:
    data = b""
    for start in range(0, len(text), 5):
        number = 0
        for digit in text[start : start + 5]:
            number = number * 85 + _Z85.index(digit)
        data += number.to_bytes(4, "big")
    return data
