"""Values that a producer chooses make no hash table slow.

A hash without a secret has many values that it gives one number, and a table of them takes
quadratic time. The work inside of libraries cannot be counted, so the time of such values is
compared with that of ordinary ones, with a wide margin. Each use of a hash table of a library is in
a list here, with the reason why its values are none that a producer chooses.
"""

from __future__ import annotations

import ast
import base64
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FieldDescriptor

from ledgerlake.decode.codes import codes_of
from ledgerlake.decode.columns import Encoded
from ledgerlake.decode.messages import decode_bundle
from ledgerlake.operators.cancelled import cancelled_rows
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.schedules.cancels import Cancels, parse_cancel
from ledgerlake.values.row_query import row_query
from ledgerlake.values.schemas import decoder
from ledgerlake.values.typed import by_version
from ledgerlake.wire.chunks import encode_marker, parse_marker
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.limits import MAX_QUERY_MAP_ENTRIES
from ledgerlake.wire.message_id import AFTER_ALL, Position
from ledgerlake.wire.value_schema import ValueSchema
from tests.entries import SOURCE, broker, bundle, metadata
from tests.hostile_values import (
    numbers_of_protobuf,
    pairs_of_python,
    texts_of_arrow,
    texts_of_duckdb,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).parents[1]

# A hash table of hostile values took hundreds of times as long; sorting takes a few times as long.
MOST_TIMES = 20
LEAST_SECONDS = 0.02


def check_time(work: Callable[[Any], object], ordinary: Any, hostile: Any) -> None:
    """Fail if work on hostile values takes much longer than on as many ordinary ones."""
    work(ordinary)
    taken, limit = _seconds(work, hostile), max(_seconds(work, ordinary), LEAST_SECONDS)
    # Another process may have had the machine's caches.
    if taken > MOST_TIMES * limit:
        taken = min(taken, _seconds(work, hostile))
    assert taken <= MOST_TIMES * limit, f"{taken:.2f} s, and {limit:.2f} s for ordinary values"


def _seconds(work: Callable[[Any], object], values: Any) -> float:
    began = time.process_time()
    work(values)
    return time.process_time() - began


def texts(count: int) -> list[str]:
    return [f"{number:016}" for number in range(count)]


def of_properties(names: Sequence[str]) -> bytes:
    properties = [pb.KeyValue(key=name, value="") for name in names]
    message = pb.SingleMessageMetadata(payload_size=0, properties=properties)
    return bundle(
        [encode_entry(metadata(num_messages_in_batch=1), encode_batch([(message, b"")]), broker())]
    )


def test_names_of_properties_are_decoded_in_time() -> None:
    def decode(frames: bytes) -> None:
        (part,) = decode_bundle(frames, SOURCE)
        assert len(part.messages["properties"][0]) == 40_000

    check_time(decode, of_properties(texts(40_000)), of_properties(texts_of_arrow(40_000)))


def test_of_a_name_that_is_there_twice_among_hostile_ones_the_last_value_counts() -> None:
    names = texts_of_arrow(100)
    message = pb.SingleMessageMetadata(
        payload_size=0,
        properties=[
            pb.KeyValue(key=name, value=str(place)) for place, name in enumerate([*names, names[7]])
        ],
    )
    entry = encode_entry(
        metadata(num_messages_in_batch=1), encode_batch([(message, b"")]), broker()
    )
    (part,) = decode_bundle(bundle([entry]), SOURCE)
    expected = [(name, str(place)) for place, name in enumerate(names) if place != 7]
    assert part.messages["properties"][0].as_py() == [*expected, (names[7], "100")]


def test_schema_versions_and_values_of_partitions_are_told_apart_in_time() -> None:
    def tell(values: pa.Array) -> None:
        assert len(codes_of(values)[1]) == len(list(by_version(values.cast(pa.binary()))))

    check_time(tell, pa.array(texts(40_000)), pa.array(texts_of_arrow(40_000)))


def test_keys_are_looked_up_among_cancels_in_time() -> None:
    cancel = parse_cancel("key=other", Position(9, 9), 0)
    assert cancel is not None

    def delayed(keys: list[str]) -> pa.RecordBatch:
        singles = [pb.SingleMessageMetadata(payload_size=0, partition_key=key) for key in keys]
        fields = metadata(num_messages_in_batch=len(keys), deliver_at_time=5)
        entry = encode_entry(fields, encode_batch([(one, b"") for one in singles]), broker())
        (part,) = decode_bundle(bundle([entry]), SOURCE)
        return part.messages

    def look_up(messages: pa.RecordBatch) -> None:
        assert not cancelled_rows(messages, Cancels([cancel])).any()

    check_time(look_up, delayed(texts(40_000)), delayed(texts_of_arrow(40_000)))


def test_the_positions_of_a_marker_are_read_in_time() -> None:
    def read(pairs: list[tuple[int, int]]) -> None:
        marker = encode_marker(metadata(), 3, [Position(*pair) for pair in pairs])
        assert len(parse_marker(marker, AFTER_ALL).positions) == len(pairs)

    check_time(read, [(7, entry) for entry in range(10_000)], pairs_of_python(10_000))


def test_cancels_by_id_are_looked_up_in_time() -> None:
    def look_up(pairs: list[tuple[int, int]]) -> None:
        cancels = Cancels()
        for ledger, entry in pairs:
            cancel = parse_cancel(f"id={ledger}:{entry}", Position(9, 9), 0)
            assert cancel is not None
            cancels.add(cancel)
        assert not cancels.may_hit(Position(1, 1), 5)

    check_time(look_up, [(7, entry) for entry in range(10_000)], pairs_of_python(10_000))


def map_schema() -> ValueSchema:
    kind = FieldDescriptor
    file = descriptor_pb2.FileDescriptorProto(name="m.proto", package="m", syntax="proto3")
    root = file.message_type.add(name="R")
    entry = root.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kind.TYPE_INT64, label=1)
    entry.field.add(name="value", number=2, type=kind.TYPE_INT64, label=1)
    of_entry = {"type": kind.TYPE_MESSAGE, "type_name": ".m.R.CountsEntry"}
    root.field.add(name="counts", number=1, label=3, **of_entry)
    files = descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString()
    definition = {
        "fileDescriptorSet": base64.b64encode(files).decode(),
        "rootMessageTypeName": "m.R",
    }
    return ValueSchema(pb.Schema.ProtobufNative, json.dumps(definition).encode())


def of_map(keys: Sequence[int]) -> bytes:
    def number(value: int) -> bytes:
        digits = [value >> shift & 127 for shift in range(0, 64, 7) if value >> shift] or [0]
        return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])

    entries = [b"\x08" + number(key) + b"\x10" + number(place) for place, key in enumerate(keys)]
    return b"".join(b"\x0a" + number(len(entry)) + entry for entry in entries)


def test_keys_of_a_protobuf_map_are_decoded_in_time() -> None:
    schema = map_schema()
    read = decoder(schema, schema).read

    def decode(payload: bytes) -> None:
        decoded = read(Encoded(pa.array([payload], pa.binary()), None))
        assert not decoded.bad
        assert len(decoded.values[0].as_py()["counts"]) == 40_000

    check_time(decode, of_map(range(40_000)), of_map(numbers_of_protobuf(40_000)))


def test_of_a_key_that_is_twice_in_a_protobuf_map_the_last_value_counts() -> None:
    schema = map_schema()
    payloads = pa.array([of_map([5, 3, 5])], pa.binary())
    decoded = decoder(schema, schema).read(Encoded(payloads, None))
    assert decoded.values.to_pylist() == [{"counts": [("5", 2), ("3", 1)]}]


def of_names(names: Sequence[str]) -> pa.RecordBatch:
    properties = pa.array([[(name, "") for name in names]], pa.map_(pa.string(), pa.string()))
    return pa.record_batch([pa.array(["k"]), properties], names=["key", "properties"])


@pytest.mark.parametrize("count", [MAX_QUERY_MAP_ENTRIES, 16_000])
def test_a_query_reads_hostile_names_in_time(count: int) -> None:
    query = row_query("select properties['x'] as x from messages", "[delta] sql")
    check_time(
        lambda batch: [query.of(batch) for _ in range(5)],
        of_names([f"{number:012}" for number in range(count)]),
        of_names(texts_of_duckdb(count)),
    )


def test_the_hashes_of_texts_have_a_secret_wherever_spark_starts_python() -> None:
    code = (
        "import os\n"
        "from ledgerlake.runtime.session import python_of\n"
        "with python_of('local[1]', {'spark.executorEnv.A': 'b'}):\n"
        "    print(os.environ['PYTHONHASHSEED'])\n"
    )
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONHASHSEED"}
    command = [sys.executable, "-c", code]
    seeds = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert len({"0\n", *seeds}) == 3


# Functions of Arrow, NumPy, pandas and Spark that make hash tables, and the module of DuckDB.
TABLES = {
    *("dictionary_encode", "unique", "value_counts", "group_by", "groupBy", "is_in", "index_in"),
    *("factorize", "isin", "in1d", "union1d", "setdiff1d", "intersect1d", "setxor1d"),
    *("drop_duplicates", "dropDuplicates", "distinct", "count_distinct", "duckdb"),
}

PLACES = "the broker chooses ledgers and entries"
ROWS = "numbers of rows, files or micro-batches are counted here"
NAMES = "the configuration or Ledgerlake chooses these names"
SORTED = "NumPy sorts if it returns places or counts"
SECRET = "the values are hashes with a secret, or of a cryptographic hash"
FEW = "a table of a few own names is looked up, and producers' values are not in it"
NO_TABLE = "this is no function of a library"
LIMITED = "a query gets maps of limited size; SECURITY.md names its other functions"

# Where they are used, and why no producer chooses what is in the table.
REASONS = {
    "streaming/ledgerlake/delay/snapshot.py::describe_segment": PLACES,
    "streaming/ledgerlake/delay/tracker.py::_is_repeated": PLACES,
    "streaming/ledgerlake/inspect/delayed_counts.py::_due_times_in_state": ROWS,
    "streaming/ledgerlake/inspect/schedule_pauses.py::_repeating": NAMES,
    "streaming/ledgerlake/operators/cancelled.py::_are_of_ledgers": SORTED,
    "streaming/ledgerlake/operators/outcome_digest.py::reject_tally": NAMES,
    "streaming/ledgerlake/operators/schedule_events.py::delayed_ids": SECRET,
    "streaming/ledgerlake/operators/stateful.py::stateful": NAMES,
    "streaming/ledgerlake/operators/task_controls.py::_take": PLACES,
    "streaming/ledgerlake/operators/task_controls.py::at_once": PLACES,
    "streaming/ledgerlake/operators/transforms.py::apply": ROWS,
    "streaming/ledgerlake/operators/transforms.py::_make": ROWS,
    "streaming/ledgerlake/operators/transforms.py::_with_partitions": ROWS,
    "streaming/ledgerlake/replay/replay.py::_write_messages": ROWS,
    "streaming/ledgerlake/replay/replay.py::_is_at_place": PLACES,
    "streaming/ledgerlake/replay/replay.py::_present": NO_TABLE,
    "streaming/ledgerlake/replay/replay.py::_once": SORTED,
    "streaming/ledgerlake/replay/replay_messages.py::messages_of_entries": ROWS,
    "streaming/ledgerlake/replay/replay_messages.py::_are_read": ROWS,
    "streaming/ledgerlake/replay/replay_rejects.py::_find": FEW,
    "streaming/ledgerlake/schedules/cancel_messages.py::rows_with_property": FEW,
    "streaming/ledgerlake/schedules/schedules.py::discard": PLACES,
    "streaming/ledgerlake/schedules/schedules.py::are_marked": PLACES,
    "streaming/ledgerlake/source/views.py::_without_rejects": FEW,
    "streaming/ledgerlake/table/compaction.py::write": ROWS,
    "streaming/ledgerlake/table/latest_index.py::drop": ROWS,
    "streaming/ledgerlake/table/latest_index.py::move": ROWS,
    "streaming/ledgerlake/table/latest_index.py::_delete": ROWS,
    "streaming/ledgerlake/table/latest_index.py::ranks": NAMES,
    "streaming/ledgerlake/table/log_commit.py::is_at": NO_TABLE,
    "streaming/ledgerlake/table/replacement.py::replace_files": NO_TABLE,
    "streaming/ledgerlake/table/spark_table.py::effective_times_us": NAMES,
    "streaming/ledgerlake/table/spark_table.py::keys_of": NAMES,
    "streaming/ledgerlake/verify/entry_set.py::__init__": PLACES,
    "streaming/ledgerlake/verify/latest_rows.py::judge": SORTED,
    "streaming/ledgerlake/verify/latest_rows.py::_last_of_each": PLACES,
    "streaming/ledgerlake/verify/latest_rule.py::judge": SORTED,
    "streaming/ledgerlake/verify/latest_rule.py::_without_messages": PLACES,
    "streaming/ledgerlake/verify/table_rows.py::_by_values": NAMES,
    "streaming/ledgerlake/verify/table_rows.py::rejected_keys": FEW,
    "streaming/ledgerlake/verify/table_rows.py::not_replayed": SORTED,
    "streaming/ledgerlake/verify/verify.py::read_topic": FEW,
    "udfs/ledgerlake/values/protobuf_loop.py::_names": SORTED,
    "udfs/ledgerlake/values/row_query.py::_beside": ROWS,
    "udfs/ledgerlake/values/row_query.py::_connection": LIMITED,
    "udfs/ledgerlake/values/row_query.py::_has_ended": LIMITED,
}


def uses(node: ast.AST, inside: str) -> Iterator[str]:
    """The functions that call one of ``TABLES`` or import it."""
    for child in ast.iter_child_nodes(node):
        called = child.func if isinstance(child, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        imported = [one.name for one in child.names] if isinstance(child, ast.Import) else []
        if TABLES.intersection([name, *imported]):
            yield inside
        own = child.name if isinstance(child, ast.FunctionDef) else inside
        # Types alone are imported under a condition.
        if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
            yield from uses(child, own)


def test_each_hash_table_of_a_library_has_a_reason() -> None:
    found = {
        f"{path.relative_to(ROOT)}::{function}"
        for room in ("proto", "streaming", "udfs")
        for path in (ROOT / room).rglob("*.py")
        for function in uses(ast.parse(path.read_text()), "")
    }
    assert sorted(found - REASONS.keys()) == [], "use codes_of, or say why no producer chooses it"
    assert sorted(REASONS.keys() - found) == []
