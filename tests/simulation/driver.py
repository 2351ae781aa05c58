"""The product in a simulated world: everything here that depends on how its own modules are cut.

Replaced are the edges alone, each by one of the same shape:

    time, threading, uuid, secrets     of every module of the product: ``world``
    Place.filesystem                   a disk in memory: ``disk``
    client.session.Transport           a broker in memory: ``broker``
    deltalake.DeltaTable               a log in memory: ``lake``
    SparkSession                       ``spark``
"""

from __future__ import annotations

import copy
import importlib
import logging
import pkgutil
import secrets
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyspark
from deltalake import DeltaTable, QueryBuilder

import ledgerlake
from ledgerlake.client import cluster, session
from ledgerlake.decode import data_keys
from ledgerlake.errors import CorruptEntryError, LedgerlakeError
from ledgerlake.operators import bucket_storage, outcome_files, repeating, stateful
from ledgerlake.options import config as configs
from ledgerlake.options.config import parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.failures import cause_of
from ledgerlake.pipeline.pipeline import Pipeline
from ledgerlake.publish import republisher
from ledgerlake.publish.target_client import Receipt
from ledgerlake.schedules import cancel_messages
from ledgerlake.source import pieces, planning, range_reader
from ledgerlake.stored.places import Place
from ledgerlake.table import delta_table
from ledgerlake.table.open_table import batch_of_commit
from ledgerlake.table.ordered_files import FileWriter
from ledgerlake.wire.limits import MAX_TASK_CANCELS
from tests.simulation import world
from tests.simulation.broker import MemoryTransport
from tests.simulation.lake import MemoryTable, Sql
from tests.simulation.spark import Rows, Session
from tests.simulation.world import EPOCH_S, Carrier, Event, Lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.options.config import Config
    from ledgerlake.wire.entry import RawEntry
    from tests.simulation.broker import Cluster
    from tests.simulation.disk import Disk
    from tests.simulation.lake import Lake
    from tests.simulation.world import World

CHECKPOINT = "/sim/checkpoint"
MESSAGES = "/sim/messages"
REJECTS = "/sim/rejects"

# The reason of a reject without a key.
UNDECRYPTABLE = "undecryptable"

# Of a pipeline with many tables: messages go to the first or to the second by their entry, and all
# to the copy. Nothing is left for the table of messages, which records micro-batches.
ROUTED = ("/sim/even", "/sim/odd")
COPY = "/sim/copy"
LATEST = "/sim/latest"
TABLES: list[dict[str, Any]] = [
    {"path": ROUTED[0], "where": "entry_id % 2 = 0"},
    {"path": ROUTED[1], "where": "entry_id % 2 <> 0"},
    {"path": COPY},
]
LATEST_TABLE = {"path": LATEST, "mode": "latest", "where": "key is not null"}


class Edges:
    """The product's edges, replaced while it is entered; ``world`` and the others are set anew for
    each history.
    """

    world: World
    disk: Disk
    due: DueTopic
    # Whether there is a key for encrypted entries.
    has_keys = True

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Edges:
        self._owner = threading.current_thread()
        for shared in cluster._clusters.values():
            # It has sockets that nobody could close once it is forgotten.
            shared.close()
        for found in pkgutil.walk_packages(ledgerlake.__path__, "ledgerlake."):
            if found.name.startswith(("ledgerlake.devbroker", "ledgerlake.cli", "ledgerlake.demo")):
                continue
            importlib.import_module(found.name)
        replaced = {
            id(time): _Time(self),
            id(threading): _Threading(self),
            id(uuid): _Ids(self),
            id(secrets): _Secrets(self),
            id(ThreadPoolExecutor): _Executor,
            id(DeltaTable): MemoryTable,
            id(QueryBuilder): Sql,
        }
        for name, module in list(sys.modules.items()):
            if name.startswith("ledgerlake."):
                for attribute, value in list(vars(module).items()):
                    if id(value) in replaced:
                        self.replace(module, attribute, replaced[id(value)])
        self.replace(Place, "filesystem", lambda _place: self.disk.filesystem)
        self.replace(
            Place,
            "create_file",
            lambda place, content: MemoryTable.lake.create_file(place.root, content),
        )
        self.replace(Place, "check_exists", lambda place: self.disk.check_exists(place.root))
        self.replace(session, "Transport", MemoryTransport)
        self.replace(
            delta_table,
            "create_table",
            lambda path, schema, properties, *_: MemoryTable.lake.create(
                path.uri, schema, properties
            ),
        )
        self.replace(
            delta_table,
            "transactions_of",
            lambda path, version: MemoryTable.lake.tables[path.uri].commits[version].transactions,
        )
        self.replace(
            delta_table,
            "read_transactions",
            lambda path, version: MemoryTable.lake.tables[path.uri].transactions(version),
        )
        self.replace(
            delta_table,
            "batch_at",
            lambda path, version: batch_of_commit(
                MemoryTable.lake.tables[path.uri].commits[version].metadata
            ),
        )
        self.replace(
            delta_table,
            "files_added_at",
            lambda path, version: list(MemoryTable.lake.tables[path.uri].commits[version].files),
        )
        self.replace(delta_table.Table, "_is_newest", lambda _table, opened: opened.is_newest())
        self.replace(session, "_keep_alive", lambda _session: None)
        self.replace(pieces, "prefetched", lambda source, _most: source)
        self.replace(cluster, "os", SimpleNamespace(getpid=lambda: self.world.current.context.pid))

        def context() -> Any:
            root: Any = self.world.current.process.root
            return root.session.sparkContext

        self.replace(pyspark.TaskContext, "get", context)
        self.replace(
            outcome_files, "data_frame", lambda _columns, *rows: Rows([tuple(row) for row in rows])
        )
        # So that stops leave more messages and occurrences than a micro-batch delivers.
        self.replace(repeating, "MOST_OVERDUE", 1)
        self.replace(repeating, "MOST_PASSED", 1)
        self.replace(configs, "MOST_DUE", 1)
        # So that ranges of a few entries are cut, for as many cores as the process has.
        self.replace(planning, "_PART_BYTES", 1)
        self.replace(data_keys, "decrypted", self._decrypted)
        # Each history cuts them in its own way.
        self.replace(range_reader, "BUNDLE_BYTES", range_reader.BUNDLE_BYTES)
        self.replace(stateful, "_FRESH_BYTES", stateful._FRESH_BYTES)
        self.replace(cancel_messages, "MAX_TASK_CANCELS", MAX_TASK_CANCELS)
        # Compression takes a fifth of a history's time, and nothing that is judged depends on it.
        new_file = FileWriter._new_file
        self.replace(FileWriter, "_new_file", lambda writer, _codec: new_file(writer, "none"))
        self.replace(republisher, "TargetClient", lambda _settings: _Client(self.due))
        modules = [
            vars(module) for name, module in sys.modules.items() if name.startswith("ledgerlake.")
        ]
        variables = [
            (name, value)
            for names in modules
            for name, value in names.items()
            if _is_variable(name)
        ]
        self._kept = [
            (value, copy.copy(value))
            for _, value in variables
            if isinstance(value, (dict, list, set))
        ]
        self._level = logging.getLogger("ledgerlake").level
        logging.getLogger("ledgerlake").setLevel(logging.CRITICAL)
        return self

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    @contextmanager
    def changed(self, change: Callable[[Edges], None]) -> Iterator[None]:
        """Replace more for a while."""
        kept = len(self._before)
        change(self)
        try:
            yield
        finally:
            self._undo(kept)

    def _undo(self, kept: int) -> None:
        while len(self._before) > kept:
            owner, name, value = self._before.pop()
            setattr(owner, name, value)

    def is_outside(self) -> bool:
        """Whether the thread that asks belongs to the machine, such as one that an earlier test has
        left.
        """
        thread = threading.current_thread()
        return thread is not self._owner and not isinstance(thread, Carrier)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ledgerlake").setLevel(self._level)
        self._undo(0)
        cluster._clusters.clear()

    def enter(self, world: World, disk: Disk, brokers: Cluster, lake: Lake) -> None:
        """Another history begins."""
        self.world, self.disk, self.has_keys = world, disk, True
        MemoryTransport.cluster = brokers
        MemoryTable.lake = lake
        self._forget()

    def _decrypted(self, entry: RawEntry, _settings: Any) -> RawEntry:
        """Encrypted messages are only marked as such, since ciphers take time."""
        if not self.has_keys:
            raise CorruptEntryError("no key here opens it", reason=UNDECRYPTABLE)
        metadata = pb.MessageMetadata()
        metadata.CopyFrom(entry.metadata)
        metadata.ClearField("encryption_keys")
        return replace(entry, metadata=metadata)

    def _forget(self) -> None:
        """Let the product's modules know nothing of the histories, or tests, before this one."""
        for one, at_first in self._kept:
            one.clear()
            one.extend(at_first) if isinstance(one, list) else one.update(at_first)
        bucket_storage._recent._values.clear()
        bucket_storage._recent._bytes = 0


def _is_variable(name: str) -> bool:
    """Return whether a module's name is that of a variable which only the module uses."""
    return name.startswith("_") and not name.startswith("__") and name.islower()


class _Replaced:
    """A module with some names replaced."""

    def __init__(self, edges: Edges, module: Any) -> None:
        self._edges = edges
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Time(_Replaced):
    def __init__(self, edges: Edges) -> None:
        super().__init__(edges, time)

    def time(self) -> float:
        if self._edges.is_outside():
            return time.time()
        world = self._edges.world
        return EPOCH_S + world.now_s + world.current.process.root.skew_s

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def monotonic(self) -> float:
        return time.monotonic() if self._edges.is_outside() else self._edges.world.now_s

    def sleep(self, seconds: float) -> None:
        if self._edges.is_outside():
            time.sleep(seconds)
        else:
            self._edges.world.sleep(seconds)


class _Threading(_Replaced):
    def __init__(self, edges: Edges) -> None:
        super().__init__(edges, threading)

    def Lock(self) -> world.Lock:
        return Lock(self._edges.world)

    def RLock(self) -> world.Lock:
        return Lock(self._edges.world, again=True)

    def Event(self) -> Event:
        return Event(self._edges.world)

    def Thread(
        self, target: Callable[..., None], name: str = "", daemon: bool = True, args: Any = ()
    ) -> _Thread:
        return _Thread(self._edges.world, lambda: target(*args), name)

    def current_thread(self) -> Any:
        return self._edges.world.current.handle


class _Thread:
    """``threading.Thread``."""

    def __init__(self, world: World, work: Callable[[], None], name: str) -> None:
        self._world = world
        self._work = work
        self._name = name
        self._thread: Any = None

    def start(self) -> None:
        self._thread = self._world.spawn(self._world.current.process, self._name, self._work)
        self._thread.handle = self

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.done

    def join(self, timeout: float | None = None) -> None:
        until_s = float("inf") if timeout is None else self._world.now_s + timeout
        if self.is_alive():
            self._world.pause(until_s, lambda: not self.is_alive())


class _Ids(_Replaced):
    def __init__(self, edges: Edges) -> None:
        super().__init__(edges, uuid)

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self._edges.world.names.getrandbits(128), version=4)


class _Secrets(_Replaced):
    def __init__(self, edges: Edges) -> None:
        super().__init__(edges, secrets)

    def randbits(self, count: int) -> int:
        return self._edges.world.names.getrandbits(count)

    def token_hex(self, count: int = 32) -> str:
        return self._edges.world.names.randbytes(count).hex()


class _Executor:
    """``ThreadPoolExecutor``, whose work is done when it is handed over."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Executor:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def shutdown(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done

    def map(self, work: Callable[..., Any], *items: Any) -> Iterator[Any]:
        return iter([work(*one) for one in zip(*items, strict=False)])


def _mistake(error: BaseException | None) -> str:
    """An error that no fault of the world explains, with where it came from; empty if it is another
    one.
    """
    if not isinstance(
        error, (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
    ):
        return ""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return (
        f"{type(error).__name__}: {error} ({place.filename.rpartition('/')[2]}, line "
        f"{place.lineno})"
    )


class DueTopic:
    """The topic of due messages: a broker with deduplication."""

    def __init__(self, world: World, stored: Callable[[bytes, dict[str, str]], None]) -> None:
        self.world = world
        self.stored = stored
        self.sequences: dict[str, int] = {}


class _Client:
    """The client of the topic of due messages; it sends at once, without a thread."""

    def __init__(self, due: DueTopic) -> None:
        self._due = due

    def partitions(self, topic: str) -> list[str]:
        return [topic]

    def open_producer(self, _topic_partition: str, name: str, _earlier_number: int) -> _Producer:
        self._due.world.access("open producer")
        return _Producer(self._due, name)

    def close(self) -> None:
        pass


class _Producer:
    def __init__(self, due: DueTopic, name: str) -> None:
        self._due = due
        self._name = name
        self.last_sequence_id = due.sequences.get(name, -1)

    def send(self, metadata: Any, content: bytes, on_receipt: Callable[[Receipt], None]) -> None:
        sequence_id = metadata.sequence_id
        verdict = self._due.world.access("publish")
        if verdict == "fail" and sequence_id % 2 == 0:
            raise ConnectionError("the broker is away")
        if sequence_id > self._due.sequences.get(self._name, -1):
            self._due.sequences[self._name] = sequence_id
            self._due.stored(content, {entry.key: entry.value for entry in metadata.properties})
        on_receipt(Receipt("DeadlineError" if verdict == "fail" else "Ok"))
        self._due.world.access("published")


def config(
    topics: list[str],
    pattern: str | None = None,
    starting: str = "earliest",
    **sections: dict[str, Any],
) -> Config:
    """The pipeline's configuration."""
    source: dict[str, Any] = {"service_url": "pulsar://broker-0:6650", "starting": starting}
    source |= {"topics_pattern": pattern} if pattern else {"topics": topics}
    data = {
        "source": source | sections.pop("source", {}),
        "stream": {"name": "sim", "checkpoint": CHECKPOINT, "trigger": "1 second"},
        "delta": {"path": MESSAGES, "rejects_path": REJECTS, "writer": "arrow"},
    }
    return parse_config(data | sections)


class Application:
    """What ``ledgerlake run`` does, as one process; ``ended`` says how."""

    def __init__(
        self,
        world: World,
        name: str,
        settings: Config,
        disk: Disk,
        lake: Lake,
        once: bool = False,
        cores: int = 2,
    ) -> None:
        self.world = world
        self.exits: Callable[[], None] = lambda: None
        self.process = world.process(name)
        # The broker's clock counts, not that of the machine.
        self.process.skew_s = world.names.choice([0.0, -3600.0, 3600.0])
        self.session = Session(world, self.process, disk, lake, cores)
        self.process.session = self.session  # type: ignore[attr-defined]
        self.settings = settings
        self.once = once
        self.ended = ""
        self.ended_s = 0.0
        self.was_refused = False
        self.was_alone = True
        self.mistake = ""
        self.error: BaseException | None = None
        self.committed = 0
        self.pipeline: Any = None
        self._stop = Event(world)
        world.spawn(self.process, name, self._run)

    @property
    def is_running(self) -> bool:
        return not self.ended and not self.process.is_dead

    def ask_to_stop(self) -> None:
        """SIGINT."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._work()
            self.ended = "ended"
        except LedgerlakeError as error:
            self.error, self.ended = error, f"{type(error).__name__}: {error}"
            self.was_refused = True
        except Exception as error:
            # The command puts it so.
            self.error = cause_of(error)
            self.ended, self.was_refused = f"{type(self.error).__name__}: {self.error}", True
            self.mistake = self.mistake or _mistake(error)
        if self.session.query is not None:
            self.mistake = self.mistake or _mistake(self.session.query.failure)
        self.ended_s = self.world.now_s
        self.world.say(f"{self.process.name} ended: {self.ended}")
        self.exits()

    def _work(self) -> None:
        pipeline = self.pipeline = Pipeline(self.session, self.settings, self._count)
        try:
            pipeline.start(self.once)
            while not self._stop.is_set() and not pipeline.wait(0.5):
                pass
            pipeline.stop()
        finally:
            pipeline.close()

    def _count(self, _result: Any) -> None:
        self.committed += 1
