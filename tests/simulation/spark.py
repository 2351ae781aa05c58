"""A small Spark: sessions, a plan of three stages, and the micro-batch driver with its logs in
Spark's order.

    offsets/N       written before batch N is planned; put if absent, so that of two drivers one
                    fails
    tasks           read, shuffle, state; one that fails is tried again, one may run twice and one
                    of the results is taken
    state N+1       written by the tasks of batch N, which began from state N
    foreachBatch    the pipeline's own function
    commits/N       written behind it; put if absent
    source.commit   the end of batch N-1, when batch N has been planned

At a start, offsets/N without commits/N is run again with the same start and end, from state N.
"""

from __future__ import annotations

import json
import pickle
import traceback
import zlib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ledgerlake.errors import LedgerlakeError
from ledgerlake.operators import stateful
from ledgerlake.source import range_reader
from tests.operators.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.simulation.disk import Disk
    from tests.simulation.lake import Lake
    from tests.simulation.world import Process, World

# The pause before Spark asks for new data again.
_POLLING_DELAY_S = 0.01

TASK_TRIES = 4

# How many of the batches are run again at once, under another cut.
_REPEATED = 0.3

# How many tasks the stateful stage has.
STATE_PARTITIONS = 2

# By topic partition: the state variables by name, each with its kind and its values.
State = dict[tuple[str, int], dict[str, tuple[Any, dict[Any, Any]]]]


class TaskLostError(Exception):
    """A worker died; Spark tries its task again."""


class Interrupted(BaseException):
    """The query was stopped."""


class Session:
    """One application's SparkSession, and the processes that it has."""

    def __init__(self, world: World, process: Process, disk: Disk, lake: Lake, cores: int) -> None:
        self.world = world
        self.process = process
        self.disk = disk
        self.lake = lake
        self.planner = world.process(f"{process.name}'s planner", process)
        self.workers = [
            world.process(f"{process.name}'s worker {number}", process) for number in range(2)
        ]
        self.conf = _Conf()
        self.sources: dict[str, Any] = {}
        self.dataSource = SimpleNamespace(register=self._register)
        self.sparkContext = _Context(cores)
        self.query: Query | None = None

    @property
    def readStream(self) -> _Reader:
        return _Reader(self)

    def _register(self, source: Any) -> None:
        self.sources[source.name()] = source

    @contextmanager
    def inside(self, process: Process) -> Iterator[None]:
        """Run code of another process of the application, while this thread waits for it."""
        thread = self.world.current
        before, thread.context = thread.context, process
        try:
            yield
        finally:
            thread.context = before


class _Conf:
    def __init__(self) -> None:
        self._values = {"spark.sql.shuffle.partitions": "2"}

    def set(self, name: str, value: str) -> None:
        self._values[name] = value

    def get(self, name: str, default: str | None = None) -> str | None:
        return self._values.get(name, default)

    def unset(self, name: str) -> None:
        self._values.pop(name, None)


class _Context:
    def __init__(self, parallelism: int) -> None:
        self.defaultParallelism = parallelism
        self._properties: dict[str, str] = {}

    def setLocalProperty(self, name: str, value: str) -> None:
        self._properties[name] = value

    def getLocalProperty(self, name: str) -> str | None:
        return self._properties.get(name)


class _Reader:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._format = ""
        self._options: dict[str, str] = {}

    def format(self, name: str) -> _Reader:
        self._format = name
        return self

    def options(self, **options: str) -> _Reader:
        self._options |= options
        return self

    def load(self) -> Frame:
        source = self._session.sources[self._format](self._options)
        return Frame(self._session, source.streamReader(None))


class Frame:
    """A streaming DataFrame of the one plan that the pipeline has."""

    def __init__(self, session: Session, reader: Any, processor: Any = None) -> None:
        self.sparkSession = session
        self.reader = reader
        self.processor = processor

    def groupBy(self, *_: str) -> Frame:
        return self

    def transformWithStateInPandas(self, processor: Any, *_: Any) -> Frame:
        return Frame(self.sparkSession, self.reader, processor)

    @property
    def writeStream(self) -> _Writer:
        return _Writer(self)


class _Writer:
    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._options: dict[str, str] = {}
        self._trigger: dict[str, Any] = {}
        self._body: Any = None

    def queryName(self, _name: str) -> _Writer:
        return self

    def option(self, name: str, value: str) -> _Writer:
        self._options[name] = value
        return self

    def foreachBatch(self, body: Any) -> _Writer:
        self._body = body
        return self

    def trigger(self, **trigger: Any) -> _Writer:
        self._trigger = trigger
        return self

    def start(self) -> Query:
        interval = self._trigger.get("processingTime", "0 milliseconds")
        query = Query(
            self._frame,
            self._options["checkpointLocation"],
            self._body,
            None if "availableNow" in self._trigger else int(interval.split()[0]) / 1000,
        )
        self._frame.sparkSession.query = query
        query.begin()
        return query


class Query:
    """A running query: its thread is the JVM's stream thread."""

    def __init__(
        self,
        frame: Frame,
        checkpoint: str,
        body: Callable[[Any, int], None],
        interval_s: float | None,
    ) -> None:
        self._session = frame.sparkSession
        self._world = self._session.world
        self._disk = self._session.disk
        self._frame = frame
        self._checkpoint = checkpoint
        self._body = body
        self._interval_s = interval_s
        self._stopped = False
        self._ended = False
        self._error: BaseException | None = None
        self.failure: BaseException | None = None
        self.batch_id = 0
        self.batches = 0
        # Pickled as Spark does it: one copy for the planner's process, one for the workers.
        self._planner, self._reader = (pickle.loads(pickle.dumps(frame.reader)) for _ in range(2))
        self._start: str | None = None
        self._end: str | None = None
        self._planned = False
        self._loaded: tuple[int, State] | None = None
        self._state_id = ""
        # Settings are a query's own from its start. In version 2 each run of a batch writes state
        # of its own name.
        self._has_state_ids = (
            self._session.conf.get("spark.sql.streaming.stateStore.checkpointFormatVersion") == "2"
        )
        self.id = self._query_id()
        self.runId = "run"
        self.name = "query"

    # What the pipeline sees

    @property
    def isActive(self) -> bool:
        return not self._ended

    def exception(self) -> BaseException | None:
        return self._error

    def awaitTermination(self, timeout: float | None = None) -> bool:
        until_s = float("inf") if timeout is None else self._world.now_s + timeout
        self._world.pause(until_s, lambda: self._ended)
        if self._error is not None:
            raise self._error
        return self._ended

    def stop(self) -> None:
        self._world.access("stop query")
        self._stopped = True
        self._world.pause(float("inf"), lambda: self._ended)

    @property
    def lastProgress(self) -> Any:
        return None

    @property
    def recentProgress(self) -> list[Any]:
        return []

    @property
    def status(self) -> dict[str, Any]:
        return {"isDataAvailable": False, "isTriggerActive": False, "message": ""}

    # The stream thread

    def begin(self) -> None:
        self._world.spawn(
            self._session.process, f"{self._session.process.name}'s stream", self._run
        )

    def _run(self) -> None:
        try:
            self._recover()
            if self._interval_s is None:
                with self._session.inside(self._session.planner):
                    self._planner.prepareForTriggerAvailableNow()
            while not self._stopped:
                began_s = self._world.now_s
                if not self._planned:
                    self._planned = self._plan()
                if self._planned:
                    self._run_batch()
                elif self._interval_s is None:
                    break
                else:
                    self._wait_until(self._world.now_s + _POLLING_DELAY_S)
                if self._interval_s is not None:
                    self._wait_until(began_s + self._interval_s)
        except Interrupted:
            pass
        except (LedgerlakeError, Exception) as error:
            self.failure = error
            self._error = StreamingQueryException(_as_text(error))
        if not self._session.process.is_dead:
            with self._session.inside(self._session.planner):
                self._planner.stop()
        self._ended = True

    def _wait_until(self, time_s: float) -> None:
        if time_s > self._world.now_s:
            self._world.pause(time_s, lambda: self._stopped)

    def _check_stopped(self) -> None:
        """A stop interrupts the stream thread wherever it waits."""
        if self._stopped:
            raise Interrupted

    def _recover(self) -> None:
        latest = self._last("offsets")
        if latest is None:
            return
        self.batch_id, self._end = latest, self._offset(latest)
        self._start = self._offset(latest - 1) if latest else None
        self._planned = True
        committed = self._last("commits")
        if committed == latest:
            self.batch_id, self._start, self._planned = latest + 1, self._end, False

    def _plan(self) -> bool:
        self._world.access("plan")
        with self._session.inside(self._session.planner):
            start = (
                self._planner.initialOffset() if self._start is None else json.loads(self._start)
            )
            limit = (
                self._planner.getDefaultReadLimit()
                if self._interval_s is not None
                else ReadAllAvailable()
            )
            found = self._planner.latestOffset(start, limit)
        end = json.dumps(found)
        self._check_stopped()
        if end == self._start:
            return False
        self._end = end
        begin = self._start if self._start is not None else json.dumps(start)
        self._begin = begin
        self._put("offsets", self.batch_id, f'v1\n{{"batchWatermarkMs":0}}\n{end}')
        if self.batch_id:
            with self._session.inside(self._session.planner):
                self._planner.commit(json.loads(self._offset(self.batch_id - 1)))
        return True

    def _run_batch(self) -> None:
        self._check_stopped()
        with self._session.inside(self._session.planner):
            start = (
                self._planner.initialOffset() if self._start is None else json.loads(self._start)
            )
            spans = self._planner.partitions(start, json.loads(self._end or ""))
        self._world.say(f"{self._session.process.name}: batch {self.batch_id} of {_spans(spans)}")
        self._session.sparkContext.setLocalProperty("sql.streaming.queryId", self.id)
        batch = _Batch(self, spans)
        self._world.access(f"batch {self.batch_id}")
        self._body(batch, self.batch_id)
        if self._world.rng.random() < _REPEATED:
            # The table has the first run's rows, and the state will be that of the second one.
            self._world.say(f"{self._session.process.name}: batch {self.batch_id} once more")
            self._body(_Batch(self, self._planned_elsewhere(start)), self.batch_id)
        # Spark would run the plan itself where the function did not.
        self._world.access(f"ran {self.batch_id}")
        self._check_stopped()
        version = 2 if self._state_id else 1
        self._put(
            "commits",
            self.batch_id,
            f"v{version}\n" + json.dumps({"stateUniqueIds": self._state_id}),
        )
        self.batches += 1
        self.batch_id, self._start, self._planned = self.batch_id + 1, self._end, False

    def _planned_elsewhere(self, start: dict[str, Any]) -> list[Any]:
        """The tasks of the batch as a process plans them that knows nothing but its offsets."""
        with self._session.inside(self._session.planner):
            planner = pickle.loads(pickle.dumps(self._frame.reader))
            spans: list[Any] = planner.partitions(start, json.loads(self._end or ""))
            planner.stop()
        return spans

    # The logs

    def _query_id(self) -> str:
        path = f"{self._checkpoint}/metadata"
        if path not in self._disk.files:
            number = self._world.rng.getrandbits(64)
            self._disk.write(path, json.dumps({"id": f"{number:016x}"}).encode())
        return str(json.loads(self._disk.files[path])["id"])

    def _last(self, log: str) -> int | None:
        start = f"{self._checkpoint}/{log}/"
        return max(
            (int(file[len(start) :]) for file in self._disk.files if file.startswith(start)),
            default=None,
        )

    def _offset(self, batch_id: int) -> str:
        data = self._disk.files.get(f"{self._checkpoint}/offsets/{batch_id}")
        if data is None:
            raise RuntimeError(f"batch {batch_id} doesn't exist")
        return str(data.decode().splitlines()[-1])

    def _put(self, log: str, batch_id: int, text: str) -> None:
        path = f"{self._checkpoint}/{log}/{batch_id}"
        if path in self._disk.files:
            raise RuntimeError(
                f"Multiple streaming queries are concurrently using {self._checkpoint}/{log}"
            )
        self._world.access(f"write {path}")
        if path in self._disk.files:
            raise RuntimeError(
                f"Multiple streaming queries are concurrently using {self._checkpoint}/{log}"
            )
        if self._disk.is_full:
            raise OSError(28, "No space left on device")
        self._disk.files[path] = text.encode()
        self._world.access(f"written {path}")

    # The plan's tasks

    def _read(self, span: Any) -> list[pa.RecordBatch]:
        return list(self._reader.read(span))

    def _cut_otherwise(self) -> None:
        """Change the sizes of bundles and of the messages in memory after the last run."""
        rng, processor = self._world.rng, self._frame.processor
        range_reader.BUNDLE_BYTES = rng.choice([1, 300, 2**20])
        stateful._FRESH_BYTES = rng.choice([0, 100, 2**26])
        delay = processor.settings.delay
        settings = replace(delay.settings, max_fresh_messages=rng.choice([0, 2, 200_000]))
        processor.settings = replace(processor.settings, delay=replace(delay, settings=settings))

    def collect(self, spans: list[Any]) -> list[Any]:
        self._cut_otherwise()
        rows = [
            row
            for span in spans
            for row in self._task("read", partial(self._read, span), self._mixed)
        ]
        groups: dict[tuple[str, int], list[pa.RecordBatch]] = {}
        for row in rows:
            groups.setdefault((row["topic"][0].as_py(), row["partition"][0].as_py()), []).append(
                row
            )
        before = self._state(self.batch_id)
        after = dict(before)
        results: list[Any] = []
        for key in sorted(groups):
            group = self._world.rng.sample(groups[key], len(groups[key]))
            partition_results, after[key] = self._task(
                "state", partial(self._keyed, key, group, before)
            )
            results += partition_results
        self._state_id = f"{self._world.names.getrandbits(64):016x}" if self._has_state_ids else ""
        path = self._state_path(self.batch_id + 1, self._state_id)
        self._disk.write(path, _Changes(_changes(before, after)))
        self._loaded = (self.batch_id + 1, after)
        return results

    def _state_path(self, version: int, state_id: str) -> str:
        return f"{self._checkpoint}/state/{version}{'_' if state_id else ''}{state_id}"

    def _state(self, version: int) -> State:
        """The state of a version: kept in memory from batch to batch, at a start put together from
        the changes of all.
        """
        if self._loaded is not None and self._loaded[0] == version:
            return self._loaded[1]
        values: State = {}
        for number in range(1, version + 1):
            commit = self._disk.files.get(f"{self._checkpoint}/commits/{number - 1}")
            state_id = (
                json.loads(commit.decode().splitlines()[-1]).get("stateUniqueIds", "")
                if commit
                else ""
            )
            found = self._disk.files.get(self._state_path(number, state_id))
            if found is None:
                raise RuntimeError(
                    f"Error reading delta file of state, version {number}: it does not exist"
                )
            _apply(values, found.values)
        return values

    def _keyed(
        self, key: tuple[str, int], rows: list[pa.RecordBatch], before: State
    ) -> tuple[list[Any], Any]:
        stage = Stage(None, None)  # type: ignore[arg-type]
        for name, (kind, values) in before.get(key, {}).items():
            state = kind()
            state.values = dict(values)
            stage.states[name] = state
        processor = self._frame.processor
        processor.init(stage)
        columns = pa.Table.from_batches(rows).to_pydict().values()
        frames = iter([Rows(list(zip(*columns, strict=True)))])
        found = [
            row for frame in processor.handleInputRows(key, frames, None) for row in frame.rows
        ]
        results = [SimpleNamespace(result=result) for (result,) in found]
        return results, {
            name: (type(state), dict(state.values)) for name, state in stage.states.items()
        }

    def _mixed(
        self, first: list[pa.RecordBatch], second: list[pa.RecordBatch]
    ) -> list[pa.RecordBatch]:
        """The rows of two runs of a task, as after the loss of an executor: each task of the
        stateful stage has the rows of one run.
        """
        runs = [self._world.rng.choice([first, second]) for _ in range(STATE_PARTITIONS)]
        return [
            row for number, run in enumerate(runs) for row in run if _state_partition(row) == number
        ]

    def _task(
        self, name: str, work: Callable[[], Any], of_two: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """One task: tried again where its worker dies; sometimes run twice."""
        for attempt in range(TASK_TRIES):
            number = self._world.rng.randrange(len(self._session.workers))
            worker = self._session.workers[number]
            try:
                with self._session.inside(worker):
                    verdict = self._world.access(f"task {name}")
                    found = work()
                    if verdict == "speculate":
                        self._world.say(f"{worker.name} runs a task twice")
                        again = work()
                        found = (
                            of_two(found, again)
                            if of_two
                            else self._world.rng.choice([found, again])
                        )
                    self._world.access(f"task done {name}")
                return found
            except TaskLostError:
                # The process is gone with its connections; another takes its place.
                worker.killed = True
                cut = self._world.process(worker.name, self._session.process)
                self._session.workers[number] = cut
                if attempt == TASK_TRIES - 1:
                    raise
        raise AssertionError("unreachable")


def _state_partition(row: pa.RecordBatch) -> int:
    key = f"{row['topic'][0].as_py()} {row['partition'][0].as_py()}"
    return zlib.crc32(key.encode()) % STATE_PARTITIONS


class Rows:
    """As much of a pandas frame as is used; a real one costs most of a
    history's time.
    """

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def itertuples(self, index: bool, name: None) -> Iterator[Any]:
        return iter(self.rows)


class _Changes:
    """What a batch changed in the state store, as a file of the disk."""

    def __init__(self, values: State) -> None:
        self.values = values

    def __len__(self) -> int:
        return 1


def _changes(before: State, after: State) -> State:
    """The state variables by key, each with the values that are new; None for those that went."""
    found: State = {}
    for key, variables in after.items():
        for name, (kind, values) in variables.items():
            old = before.get(key, {}).get(name, (kind, {}))[1]
            new = {place: value for place, value in values.items() if old.get(place) != value}
            new |= dict.fromkeys(old.keys() - values.keys())
            if new:
                found.setdefault(key, {})[name] = (kind, new)
    return found


def _apply(values: State, changes: State) -> None:
    for key, variables in changes.items():
        for name, (kind, new) in variables.items():
            _, held = values.setdefault(key, {}).setdefault(name, (kind, {}))
            for place, value in new.items():
                if value is None:
                    held.pop(place, None)
                else:
                    held[place] = value


class _Batch:
    """What ``foreachBatch`` is given."""

    def __init__(self, query: Query, spans: list[Any]) -> None:
        self._query = query
        self._spans = spans
        self.sparkSession = query._session

    def collect(self) -> list[Any]:
        return self._query.collect(self._spans)


def _spans(partitions: list[Any]) -> str:
    spans = [span for partition in partitions for span in partition.spans]
    return ", ".join(
        f"{span.topic_partition.rpartition('/')[2]} {span.after}..{span.end}" for span in spans
    )


def _as_text(error: BaseException) -> str:
    """An error as it comes out of Spark: the tracebacks of Python processes as text."""
    if isinstance(error, LedgerlakeError):
        return (
            f"Traceback (most recent call last):\nledgerlake.errors.{type(error).__name__}: {error}"
        )
    return f"{type(error).__name__}: {error}\n" + "".join(traceback.format_exception(error))
