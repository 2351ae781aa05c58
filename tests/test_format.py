"""The page of the format describes the written files: it is compared with the golden archive of a
pipeline, and with the output of today's writers.

A file with † on the page is not in the archive; then a writer makes it here. A field that a stored
dataclass gets has a value here, because values are made from the types of its fields.
"""

from __future__ import annotations

import json
import re
import tarfile
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ledgerlake.assembly.rules import IncompleteMessage
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.delay import snapshot
from ledgerlake.delay.bucket import IndexRecord, record_to_json
from ledgerlake.delay.due_times import DueSpan
from ledgerlake.delay.segment import index_rows
from ledgerlake.errors import TableError
from ledgerlake.operators import bucket_folders, bucket_storage, schedule_state
from ledgerlake.operators.outcome_digest import OutcomeDigest
from ledgerlake.operators.separately_stored import SeparatelyStored, separately_stored_to_json
from ledgerlake.operators.stateful import Processor, incomplete_to_json
from ledgerlake.options import table_options
from ledgerlake.options.config import parse_config
from ledgerlake.pb import delay_pb2 as pb
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.row_settings import Selected, row_settings, selection
from ledgerlake.publish.outbox import OtherName, Outbox, Sending
from ledgerlake.reasons import REPLACED
from ledgerlake.replay.replay_parts import Parts
from ledgerlake.schedules.cancels import Cancel, cancels_to_json
from ledgerlake.schedules.schedules import (
    MarkedPositions,
    Pauses,
    ScheduledMessage,
    waiting_to_json,
)
from ledgerlake.source.wakeup_files import WakeupTimes, save_wakeup_times
from ledgerlake.stored.offsets import PartitionOffset, to_json
from ledgerlake.stored.places import Place
from ledgerlake.table import compaction, delta_table, iceberg_table, record_table
from ledgerlake.table.batch_commit import BatchCommit, SeenBatch
from ledgerlake.table.clustered_table import ClusteredTable
from ledgerlake.table.delta_table import EFFECTIVE_TIMES, OUTBOX, Table
from ledgerlake.table.latest_table import LatestTable
from ledgerlake.table.log_commit import write_checkpoint
from ledgerlake.table.ordered_files import BufferedWriter, DataFile, data_folder
from ledgerlake.table.record_table import RecordTable
from ledgerlake.wire.message_id import Position
from tests.operators.stage import stage_settings
from tests.table.rows import rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.descriptor import FieldDescriptor

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "format.md").read_text()
GOLDEN = Path(__file__).parent / "golden"

TOPIC = "persistent://public/default/orders"
QUERY_ID = "9c4a060d-eff0-4941-a973-b727f40d22ff"
QUERY = f"ledgerlake:orders:{QUERY_ID}"
ABSENT = "†"

_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
# What stands for a name between < and > on the page.
STANDING_FOR = {
    "batch": r"\d+",
    "version": r"\d+",
    "uuid": _UUID,
    "hex": "[0-9a-f]{32}",
    "number": r"-?\d+",
    "name": "[^/]+",
    "codec": "zstd|none",
    "outcome": "[0-9a-f]{16}",
    "topic partition": r"persistent(?:://|=3A=2F=2F).+",
    "table": "messages|rejects|table:.+",
    "stream": "golden|orders",
    "query": rf"ledgerlake:(?:golden|orders):{_UUID}(?::more:\d+)?",
    "query id": _UUID,
    "bucket id": r"\d+",
    "section": r"\[delta\]|\[\[tables\]\] .+",
    "column": ".+",
    "mark": "[a-z_]+",
    "output": "table|topic",
}


# What the page says.


def tables_of(title: str) -> list[tuple[list[str], list[list[str]]]]:
    """The tables of a section of the page: the titles of the columns, and the rows."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the page has no section {title}"
    tables = []
    for text in re.findall(r"(?:^\|.*\n?)+", found[1], re.MULTILINE):
        head, _, *body = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
        )
        tables.append((head, body))
    return tables


def rows_of(title: str, column: str) -> list[list[str]]:
    """The rows of the one table of a section whose first column has a title."""
    (found,) = (body for head, body in tables_of(title) if head[0] == column)
    return found


def regex(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"<([^>]+)>", pattern)
    return re.compile(
        "".join(
            re.escape(part) if not n % 2 else f"(?:{STANDING_FOR[part]})"
            for n, part in enumerate(parts)
        )
    )


@dataclass(frozen=True)
class Pattern:
    """A name that the page has between backticks, what it says of it, and whether † stands
    beside.
    """

    text: str
    content: str
    is_absent: bool

    def fits(self, name: str) -> bool:
        return regex(self.text).fullmatch(name) is not None


def patterns(title: str, column: str) -> list[Pattern]:
    return [
        Pattern(cells[0].split("`")[1], cells[1], ABSENT in cells[0])
        for cells in rows_of(title, column)
    ]


FILES = {
    "checkpoint": [*patterns("Spark's files", "file"), *patterns("Ledgerlake's files", "file")],
    "buckets": patterns("Buckets", "file"),
    "table": patterns("Files of a table", "file"),
}
TRANSACTIONS = patterns("transactions", "app id")
PROPERTIES = patterns("properties", "property")
DOMAINS = patterns("domains", "domain")
TITLES = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
FORMS = [
    title
    for title in TITLES
    if any(head == ["field", "type", "what it is"] for head, _ in tables_of(title))
]
MESSAGES = [title for title in TITLES if any("number" in head for head, _ in tables_of(title))]
LEARNED = f"{record_table.LEARNED}<stream>"
VERSIONS = {
    cells[0].strip("[").split("]")[0].strip("`"): cells for cells in rows_of("Versions", "format")
}


def one_of(of: Iterable[Pattern], name: str) -> Pattern:
    fitting = [pattern for pattern in of if pattern.fits(name)]
    assert len(fitting) == 1, f"{name} fits {[pattern.text for pattern in fitting]} of the page"
    return fitting[0]


Path_ = tuple[str, ...]


@cache
def form(title: str) -> dict[Path_, str]:
    """The types of the fields of a form, by their paths."""
    return {path_of(cells[0].strip("`")): cells[1] for cells in rows_of(title, "field")}


def path_of(text: str) -> Path_:
    parts: list[str] = []
    for segment in text.split("."):
        found = re.fullmatch(r"(.*?)((?:\[\d*\])*)", segment)
        assert found is not None
        parts += [part for part in (found[1], *re.findall(r"\[\d*\]", found[2])) if part]
    return tuple(parts)


Seen = set[tuple[str, Path_]]


def check(title: str, value: Any, seen: Seen) -> None:
    """Check that a value has the fields of a form, no other ones, and their types."""
    _check(title, (), value, seen)
    if isinstance(value, dict) and "version" in value:
        assert value["version"] == int(VERSIONS[title][2]), f"the version of {title}"


def _check(title: str, path: Path_, value: Any, seen: Seen) -> None:
    kind = (
        form(title)
        .get(path, "list" if isinstance(value, list) else "object")
        .removesuffix(", optional")
    )
    place = f"{title}: {'.'.join(path)}"
    seen.add((title, path))
    if value is None:
        assert "or null" in kind or kind == "value", f"{place} is null"
        return
    kind = kind.removesuffix(" or null")
    simple = {"int": int, "text": str, "flag": bool}.get(kind)
    if simple is not None:
        assert type(value) is simple, f"{place} is {value!r}"
    elif kind == "value":
        assert isinstance(value, str | int | bool), f"{place} is {value!r}"
    elif kind not in ("object", "list"):
        check(kind, value, seen)
    elif isinstance(value, list):
        assert kind == "list", f"{place} is a list"
        _check_list(title, path, value, seen)
    else:
        assert kind == "object", f"{place} is {value!r}"
        assert isinstance(value, dict), f"{place} is {value!r}"
        _check_object(title, path, value, seen)


def _below(title: str, path: Path_) -> set[str]:
    return {
        known[len(path)]
        for known in form(title)
        if len(known) > len(path) and known[: len(path)] == path
    }


def _check_list(title: str, path: Path_, value: list[Any], seen: Seen) -> None:
    places = _below(title, path)
    if places != {"[]"}:
        assert places == {f"[{number}]" for number in range(len(value))}, (
            f"{title}: {'.'.join(path)} is {value}"
        )
    for number, element in enumerate(value):
        _check(title, (*path, "[]" if places == {"[]"} else f"[{number}]"), element, seen)


def _check_object(title: str, path: Path_, value: dict[str, Any], seen: Seen) -> None:
    names = _below(title, path)
    some = [name for name in names if name.startswith("<")]
    for name, element in value.items():
        fitting = (
            [name] if name in names else [known for known in some if regex(known).fullmatch(name)]
        )
        assert len(fitting) == 1, f"{title}: the field {'.'.join((*path, name))} is not on the page"
        _check(title, (*path, fitting[0]), element, seen)
    missing = {
        name
        for name in names - {*some} - value.keys()
        if not form(title).get((*path, name), "").endswith("optional")
    }
    assert not missing, f"{title}: {'.'.join(path)} lacks {missing}"


# The written files.


def filled(kind: Any) -> Any:
    """A value of a type with all fields, also the optional ones."""
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return cast(Any, kind)(**{field.name: filled(hints[field.name]) for field in fields(kind)})
    if origin is Literal:
        return arguments[0]
    if origin in (Union, UnionType):
        return filled(next(argument for argument in arguments if argument is not type(None)))
    if origin is tuple and arguments[-1] is not ...:
        return tuple(map(filled, arguments))
    if origin in (list, tuple):
        return origin([filled(arguments[0])])
    if origin is dict:
        return {TOPIC: filled(arguments[1])}
    return {int: 7, str: "text", bool: True, Any: {}, frozenset: frozenset()}[origin or kind]


def offset() -> dict[str, PartitionOffset]:
    return {TOPIC: filled(PartitionOffset)}


def batch_commit(batch_id: int) -> BatchCommit:
    read = to_json(offset())["positions"][TOPIC]
    return replace(
        filled(BatchCommit),
        stream="orders",
        query=QUERY,
        batch_id=batch_id,
        ranges={TOPIC: {"start": None if not batch_id else read, "end": read}},
        outcomes={TOPIC: filled(OutcomeDigest).to_json()},
    )


def state_values() -> dict[str, str]:
    """A text of each state variable that has texts."""
    marked = MarkedPositions()
    marked.mark(Position(3, 4), REPLACED)
    return {
        "sets": incomplete_to_json(filled(IncompleteMessage)),
        "index": record_to_json(replace(filled(IndexRecord), outputs={"table": Position(3, 4)})),
        "separate": separately_stored_to_json(filled(SeparatelyStored)),
        "cancels": cancels_to_json([filled(Cancel)], marked, filled(Pauses)),
        "schedules": waiting_to_json([filled(ScheduledMessage)]),
    }


def write_checkpoint_files(folder: Path) -> None:
    """Write all that Ledgerlake writes into a checkpoint, but the outbox."""
    checkpoint = Checkpoint(Place(str(folder)))
    checkpoint.save_start(offset())
    checkpoint.save_first_ends({TOPIC: filled(Position)})
    checkpoint.save_stream("orders", 1)
    checkpoint.save_settings(row_settings(configuration(folder)))
    settings = selection(configuration(folder))
    checkpoint.save_selected(Selected(settings, {TOPIC: filled(Position)}))
    checkpoint.save_tables({"messages": "/lake/orders", "table:lake/more": "/lake/more"})
    checkpoint.save_outbox("1a1825d3")
    checkpoint.save_forgotten_topics({TOPIC})
    checkpoint.forget()
    keeper = BatchEnds(checkpoint)
    keeper.add(filled(LastRun), {TOPIC: filled(Position)}, {"messages": filled(SeenBatch)})
    wakeups = WakeupTimes({TOPIC: 1}, {TOPIC: [filled(DueSpan)]})
    for batch_id, extends in ((0, None), (1, 0)):
        save_wakeup_times(checkpoint.folder / "ledgerlake" / "wakes", batch_id, wakeups, extends)
    write_replay(checkpoint.folder / "ledgerlake")
    for name in ("messages", "rejects"):
        write_file(folder / "ledgerlake" / "staging" / name, "part-00000000-00000")


def configuration(folder: Path) -> Any:
    return parse_config(
        {
            "source": {"service_url": "pulsar://127.0.0.1:1", "topics": [TOPIC]},
            "stream": {"name": "orders", "checkpoint": str(folder)},
            "delta": {"path": f"{folder}-messages", "rejects_path": f"{folder}-rejects"},
            "delay": {"storage": str(folder / "buckets")},
            "tables": [{"path": f"{folder}-more", "topics_pattern": "orders.*"}],
            "deliver": {"topic": f"{TOPIC}-due"},
        }
    )


class _Gone:
    """A table that is gone when a replay commits."""

    path = "lake/orders"

    def __init__(self) -> None:
        self._is_there = True

    def number(self, _name: str) -> int | None:
        if not self._is_there:
            raise TableError("gone")
        self._is_there = False
        return None


def write_replay(folder: Place) -> None:
    tables = SimpleNamespace(by_name={"messages": _Gone()}, exists=lambda _name: True)
    parts = Parts(folder, cast(Any, tables), "orders")
    parts.begin()
    with pytest.raises(TableError, match="gone"):
        parts.add(
            [TOPIC],
            {"messages": [replace(filled(DataFile), partition_values={"day": "2026-05-01"})]},
        )


def write_outbox(folder: Path) -> None:
    outbox = Outbox(Place(str(folder)))
    outbox.begin(None, None)
    for batch_id in range(3):
        (file,) = write_file(folder, f"part-{batch_id:08}-00000")
        outbox.add(batch_commit(batch_id), {TOPIC: [file]})
        if batch_id < 2:
            outbox.commit(batch_id)
    first, second = outbox.ready()
    outbox.sent(first)
    outbox.begin_sending(second, replace(filled(Sending), ends={TOPIC: filled(Position)}))
    outbox.rename(filled(OtherName))


def write_file(folder: Path, prefix: str, *keys: str) -> list[DataFile]:
    folder.mkdir(parents=True, exist_ok=True)
    writer = BufferedWriter(data_folder(Place(str(folder)), schema.MESSAGES, prefix))
    messages = [
        rows([number], number, key=key, is_null=False)
        for number, key in enumerate(keys or ("a", "b"))
    ]
    writer.write(pa.Table.from_batches(messages))
    return writer.finish()


def write_buckets(folder: Path) -> None:
    rows_of_index = index_rows([(1, 2, 3), (2, 2, 4)], [b"entry", b"entry"])
    values = [
        (1, snapshot.segment_to_bytes(rows_of_index)),
        (2, snapshot.segment_to_bytes(rows_of_index)),
        (0, snapshot.metadata_to_bytes([snapshot.describe_segment(rows_of_index)] * 2)),
    ]

    def opened(used: dict[int, int]) -> bucket_storage.FolderStorage:
        return bucket_folders.open_folder(
            Place(str(folder)), TopicPartition(TOPIC, 0), QUERY_ID, used
        )

    storage = opened({})
    kept, dropped = storage.create_bucket(), storage.create_bucket()
    for bucket_id in (kept, dropped):
        storage.save_all_segments(bucket_id, values)
    storage.delete_bucket(dropped)
    opened({kept: 2}).start()


def write_tables(folder: Path) -> None:
    """Write tables of each kind, with all that is written into their logs."""
    latest = LatestTable(Place(str(folder / "latest")), schema.MESSAGES)
    latest.check(cast(Any, None))
    latest.create({"delta.logRetentionDuration": "interval 168 hours"})
    for batch_id, keys in enumerate((("a", "b", "c"), ("a",))):
        assert not latest.contains(batch_commit(batch_id))
        latest.commit(
            batch_commit(batch_id),
            write_file(folder / "latest", f"part-{batch_id:08}-00000", *keys),
            {},
        )
    place = Place(str(folder / "partitioned"))
    columns = schema.MESSAGES.append(pa.field("day", pa.date32()))
    partitioned = Table(place, columns, {"day": "date(broker_timestamp)"})
    partitioned.create()
    partitioned.begin_stream("orders", [TOPIC])
    for record, outbox in ((batch_commit(0), {"1a1825d3": 1}), (batch_commit(0).more(1), {})):
        assert not partitioned.contains(record)
        partitioned.commit(record, [], {TOPIC: 1}, outbox)
    partitioned.append_once("ledgerlake.replay:orders", 1, None, [])
    records = RecordTable(Place(str(folder / "records")))
    records.stream = "orders"
    records.add_columns(pa.struct([("id", pa.int64())]), pa.struct([("id", pa.int64())]))
    records.create()
    clustered = ClusteredTable(Place(str(folder / "clustered")), schema.MESSAGES, ("key",))
    clustered.create()
    clustered.begin()
    for prefix in (compaction._PREFIX, compaction.CLUSTERED_PREFIX):
        write_file(folder / "clustered", prefix)
    write_checkpoint(place)


@dataclass(frozen=True)
class Written:
    """A checkpoint, a folder of buckets, and tables."""

    checkpoint: Path
    tables: tuple[Path, ...]
    buckets: Path | None = None

    def files(self) -> Iterator[tuple[Pattern, Path]]:
        """Each file, with the one pattern that it fits."""
        folders = [("checkpoint", self.checkpoint), *(("table", table) for table in self.tables)]
        if self.buckets is not None:
            folders.append(("buckets", self.buckets))
        for kind, folder in folders:
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    yield one_of(FILES[kind], file.relative_to(folder).as_posix()), file

    def actions(self, name: str) -> list[dict[str, Any]]:
        """The actions of a kind in the logs of the tables."""
        commits = [
            file for table in self.tables for file in sorted(table.glob("_delta_log/*.json"))
        ]
        actions = [json.loads(line) for file in commits for line in file.read_text().splitlines()]
        return [action[name] for action in actions if name in action]

    def documents(self) -> Iterator[tuple[str, Any]]:
        """Each JSON document, with the name of its form."""
        for pattern, file in self.files():
            of_lines = re.findall(r"`(v\d)`|\[([^]]+)\]", pattern.content)
            if of_lines and pattern.content.endswith("a line each"):
                for (version, title), line in zip(
                    of_lines, file.read_text().splitlines(), strict=True
                ):
                    assert not version or line == version
                    if title:
                        yield title, json.loads(line)
            elif of_lines:
                yield of_lines[0][1], json.loads(file.read_text())
        for info in self.actions("commitInfo"):
            own = {name: value for name, value in info.items() if name.startswith("ledgerlake")}
            yield "commitInfo", own
            if "ledgerlake" in own:
                yield "batch record", json.loads(own["ledgerlake"])


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(GOLDEN / "pipeline-v1.tar.gz") as packed:
        packed.extractall(folder, filter="data")
    return Written(folder / "checkpoint", (folder / "messages", folder / "rejects"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint_files(folder / "checkpoint")
    write_outbox(folder / "checkpoint" / "ledgerlake" / "outbox")
    write_buckets(folder / "buckets")
    write_tables(folder / "tables")
    return Written(
        folder / "checkpoint", tuple(sorted((folder / "tables").iterdir())), folder / "buckets"
    )


@pytest.fixture(scope="module")
def documents(archive: Written, made: Written) -> list[tuple[str, Any]]:
    """All JSON documents that there are, with the names of their forms."""
    contents = {cells[0].strip("`"): cells[3] for cells in rows_of("State", "variable")}
    found = [*archive.documents(), *made.documents()]
    for name, text in state_values().items():
        found.append((contents[name].strip("[").split("]")[0], json.loads(text)))
    for title, value in list(found):
        if title == "settings":
            options = value["settings"].items()
            found += [
                ("table settings", json.loads(text))
                for name, text in options
                if regex("<section>").fullmatch(name)
            ]
    # As delta-spark's commits have it.
    by_spark = {EFFECTIVE_TIMES: {TOPIC: 1}, OUTBOX: {"1a1825d3": 1}}
    found.append(("batch record", json.loads(batch_commit(1).to_json()) | by_spark))
    found.append(("offset", json.loads((GOLDEN / "offset-v1.json").read_text())))
    found.append(("incomplete message", json.loads((GOLDEN / "open-set-v1.json").read_text())))
    found.append(
        ("delayed index", json.loads((GOLDEN / "delayed-index-v1.json").read_text())["record"])
    )
    return found


def assert_names(of: list[Pattern], in_archive: Iterable[str], in_made: Iterable[str]) -> None:
    """Check that names fit the patterns of the page, and that each pattern has a name."""
    archived = {one_of(of, name) for name in in_archive}
    known = archived | {one_of(of, name) for name in in_made}
    for pattern in of:
        assert (pattern in archived) == (not pattern.is_absent), (
            f"{pattern.text}: {ABSENT} on the page"
        )
        assert pattern in known, f"{pattern.text} is on the page, and nobody writes it"


def test_each_file_fits_one_pattern_of_the_page_and_each_pattern_has_a_file(
    archive: Written, made: Written
) -> None:
    archived = {pattern for pattern, _ in archive.files()}
    known = archived | {pattern for pattern, _ in made.files()}
    for pattern in [pattern for of in FILES.values() for pattern in of]:
        assert (pattern in archived) == (not pattern.is_absent), (
            f"{pattern.text}: {ABSENT} on the page"
        )
        assert pattern in known, f"{pattern.text} is on the page, and nobody writes it"


def test_an_empty_file_of_the_page_is_empty(made: Written) -> None:
    sizes = [file.stat().st_size for pattern, file in made.files() if pattern.content == "empty"]
    assert len(sizes) == 2
    assert not any(sizes)


def test_each_json_has_the_fields_of_the_page_and_each_field_is_written(
    documents: list[tuple[str, Any]],
) -> None:
    seen: Seen = set()
    for title, value in documents:
        check(title, value, seen)
    unseen = {(title, path) for title in FORMS for path in form(title)} - seen
    # An option that is empty is not there.
    assert {title for title, _ in unseen} <= {"table settings"}, unseen


def test_a_field_that_the_page_lacks_or_that_is_missing_is_found() -> None:
    good = {"version": 1, "stream": "orders", "number": 1}
    check("stream", good, set())
    with pytest.raises(AssertionError, match="the field more is not on the page"):
        check("stream", good | {"more": 1}, set())
    with pytest.raises(AssertionError, match="lacks"):
        check("stream", {"version": 1, "stream": "orders"}, set())
    with pytest.raises(AssertionError, match="number is 'one'"):
        check("stream", good | {"number": "one"}, set())


def test_the_options_that_decide_the_rows_of_a_table_are_on_the_page() -> None:
    decisive = {field.name for field in fields(table_options.TableOptions)} - {
        *table_options._NOT_DECISIVE
    }
    assert {path[0] for path in form("table settings")} == decisive


class _Handle:
    """A handle of Spark that takes declarations."""

    def __init__(self) -> None:
        self.declared: dict[str, tuple[str, str]] = {}

    def getMapState(self, name: str, key: Any, value: Any) -> None:
        self.declared[name] = text_of(key), text_of(value)

    def getValueState(self, name: str, value: Any) -> None:
        self.declared[name] = "", text_of(value)


def text_of(kind: Any) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in kind.fields)


def state_variables() -> dict[str, tuple[str, str]]:
    """The keys and the values of the state variables by the page."""
    return {
        name.strip("`"): (key.strip("`"), value.strip("`"))
        for name, key, value, *_ in rows_of("State", "variable")
    }


def test_the_state_variables_of_the_page_are_declared() -> None:
    handle = _Handle()
    Processor(stage_settings(), cast(Any, None)).init(cast(Any, handle))
    assert handle.declared == state_variables()


def test_the_state_variables_of_the_page_are_in_the_archive(archive: Written) -> None:
    (file,) = archive.checkpoint.glob("state/0/_metadata/v2/*")
    metadata = json.loads(file.read_text().partition("\n")[2])
    kinds = json.loads(metadata["operatorPropertiesJson"])["stateVariables"]
    expected = state_variables()
    assert {kind["stateName"]: kind["stateVariableType"] for kind in kinds} == {
        name: "MapState" if key else "ValueState" for name, (key, _) in expected.items()
    }
    (schemas,) = archive.checkpoint.glob("state/0/_stateSchema/default/*")
    assert list(stored_schemas(schemas.read_bytes().decode(errors="replace"))) == [
        expected[name] for name in sorted(expected)
    ]


def stored_schemas(text: str) -> Iterator[tuple[str, str]]:
    """The key and the value of each state variable, in Spark's file."""
    decode = json.JSONDecoder().raw_decode
    kinds = [
        decode(text, found.start())[0]
        for found in re.finditer(r'(?<!"type":)\{"type":"struct"', text)
    ]
    place = 0
    while place < len(kinds):
        key = {field["name"]: field["type"] for field in kinds[place]["fields"]}
        yield types_in(key["userKey"]) if "userKey" in key else "", types_in(kinds[place + 1])
        # The key of a map follows once more.
        place += 3 if "userKey" in key else 2


def types_in(kind: dict[str, Any]) -> str:
    names = {"long": "bigint", "integer": "int"}
    return ", ".join(
        f"{field['name']} {names.get(field['type'], field['type'])}" for field in kind["fields"]
    )


def test_the_protobuf_messages_of_the_page_are_those_of_the_code() -> None:
    declared = pb.DESCRIPTOR.message_types_by_name
    assert set(MESSAGES) == set(declared)
    for title, message in declared.items():
        fields_of_page = [
            (name.strip("`"), int(number), kind)
            for name, number, kind, _ in rows_of(title, "field")
        ]
        assert fields_of_page == [
            (field.name, field.number, type_in(field)) for field in message.fields
        ], title


def type_in(field: FieldDescriptor) -> str:
    """The type of a field, as protobuf's language has it."""
    names = {
        value: name.removeprefix("TYPE_").lower()
        for name, value in vars(type(field)).items()
        if name.startswith("TYPE_")
    }
    kind = names[field.type] if field.message_type is None else field.message_type.name
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return f"map<{', '.join(map(type_in_map, field.message_type.fields))}>"
    if field.is_repeated:
        return f"repeated {kind}"
    return f"{'required' if field.is_required else 'optional'} {kind}"


def type_in_map(field: FieldDescriptor) -> str:
    return type_in(field).removeprefix("optional ")


def test_each_format_with_a_version_is_among_the_versions() -> None:
    with_version = {title for title in FORMS if ("version",) in form(title)}
    with_version |= {
        title
        for title in MESSAGES
        if any(cells[0] == "`version`" for cells in rows_of(title, "field"))
    }
    assert with_version | {LEARNED, delta_table.PARTITION_BY} == set(VERSIONS)
    assert {int(VERSIONS[title][2]) for title in ("SnapshotMetadata", "BlockDirectory")} == {
        snapshot.VERSION
    }
    assert {int(VERSIONS[title][2]) for title in ("ScheduleBlock", "ScheduleTable")} == {
        schedule_state.VERSION
    }
    learned, partition_by = record_table._VERSION, delta_table._PARTITION_VERSION
    assert [int(VERSIONS[name][2]) for name in (LEARNED, delta_table.PARTITION_BY)] == [
        learned,
        partition_by,
    ]


def test_the_transactions_of_tables_are_on_the_page(archive: Written, made: Written) -> None:
    in_archive, in_made = ({txn["appId"] for txn in of.actions("txn")} for of in (archive, made))
    assert_names(TRANSACTIONS, in_archive, in_made)


def test_the_properties_of_tables_are_on_the_page(archive: Written, made: Written) -> None:
    in_archive, in_made = (
        {name for data in of.actions("metaData") for name in data["configuration"]}
        for of in (archive, made)
    )
    assert_names(PROPERTIES, in_archive, in_made)


def test_the_domains_and_tags_of_tables_are_on_the_page(archive: Written, made: Written) -> None:
    in_archive, in_made = (
        {data["domain"] for data in of.actions("domainMetadata")} for of in (archive, made)
    )
    assert_names(DOMAINS, in_archive, in_made)
    assert not any(file.get("tags") for of in (archive, made) for file in of.actions("add"))


def test_the_properties_of_the_page_have_the_versions_of_the_page(made: Written) -> None:
    found: dict[str, str] = {}
    for table in made.tables:
        found |= DeltaTable(str(table)).metadata().configuration
    of_page = {f"{record_table.LEARNED}orders": LEARNED, delta_table.PARTITION_BY: None}
    for name, title in of_page.items():
        assert found[name].split(" ")[0] == VERSIONS[title or name][2]


def test_the_names_in_iceberg_tables_are_on_the_page() -> None:
    names = {cells[0].strip("`") for cells in rows_of("Iceberg", "name")}
    assert names == {iceberg_table._VERSION, iceberg_table._TABLE}
