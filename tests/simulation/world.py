"""Time, processes and threads of one history: one thread runs at a time, and the seed decides
which.

Every thread of the product is a ``Thread`` here, carried by a real one that waits for its turn. A
turn ends where a thread waits: for bytes, for a lock, for time to pass. Where nothing can run, the
clock goes to the next moment at which something can. So a history takes no time of its own, and the
same seed gives the same history.

What a process does to the world outside (a frame sent, a file written, a commit) is an *access*
with a label. Faults are armed on labels. A killed process gets no further: every access and every
wait of its threads raises ``Killed``, so that what its ``finally`` blocks would do to the world
does not happen.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

EPOCH_S = 1_800_000_000.0
FOREVER = float("inf")

# What one access costs on the simulated clock.
_ACCESS_S = 0.0005


class Killed(BaseException):
    """The process that this thread belongs to is gone."""


class Stuck(BaseException):
    """A history that goes on without end."""


@dataclass(eq=False)
class Process:
    """An operating system's process; those below it go with it."""

    pid: int
    name: str
    parent: Process | None = None
    killed: bool = False
    suspended: bool = False
    skew_s: float = 0.0

    @property
    def is_dead(self) -> bool:
        return self.killed or (self.parent is not None and self.parent.is_dead)

    @property
    def is_suspended(self) -> bool:
        return self.suspended or (self.parent is not None and self.parent.is_suspended)

    @property
    def root(self) -> Process:
        return self if self.parent is None else self.parent.root


@dataclass(eq=False)
class Thread:
    """One thread of a process. ``context`` is the process whose code it runs now: its own, or a
    worker below that while a task is in work.
    """

    process: Process
    name: str
    gate: threading.Lock
    context: Process
    until_s: float = 0.0
    ready: Callable[[], bool] | None = None
    done: bool = False
    error: BaseException | None = None
    handle: object = None


@dataclass
class Trap:
    """Something that happens at an access: the ``countdown``-th whose label begins with ``label``,
    of one process or of any.
    """

    label: str
    countdown: int
    act: Callable[[], str | None]
    process: str | None = None


@dataclass(eq=False)
class World:
    """One history's world. ``trace`` is what happened, in words."""

    rng: random.Random
    # Ids that the product makes up: how many there are changes nothing else.
    names: random.Random = field(default_factory=lambda: random.Random(0))
    now_s: float = 0.0
    most_accesses: int = 400_000
    trace: list[str] = field(default_factory=list)
    traps: list[Trap] = field(default_factory=list)
    accesses: int = 0
    traces_accesses: bool = False

    def __post_init__(self) -> None:
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count(1)
        self._pids = itertools.count(100)
        self._quiet = 0
        test = Process(1, "test")
        self.threads: list[Thread] = []
        self.current = self._add(test, "test")

    # Processes and threads

    def process(self, name: str, parent: Process | None = None) -> Process:
        return Process(next(self._pids), name, parent)

    def spawn(self, process: Process, name: str, work: Callable[[], None]) -> Thread:
        thread = self._add(process, name)
        thread.until_s = self.now_s

        def run(let_go: Callable[[], None]) -> None:
            try:
                if not process.is_dead:
                    work()
            except Killed:
                pass
            except BaseException as error:
                thread.error = error
            thread.done = True
            let_go()
            self._finish(thread)

        _carry(thread.gate, run)
        return thread

    def _add(self, process: Process, name: str) -> Thread:
        thread = Thread(process, name, threading.Lock(), process)
        thread.gate.acquire()
        self.threads.append(thread)
        return thread

    def kill(self, process: Process) -> None:
        """End a process; the thread that is running may be one of its own, which then ends at its
        next access.
        """
        process.killed = True

    # Waiting

    def pause(self, until_s: float, ready: Callable[[], bool] | None = None) -> None:
        """Wait until a moment, or until something is so."""
        me = self.current
        if me.context.is_dead:
            raise Killed
        me.until_s, me.ready = until_s, ready
        chosen = self._next()
        if chosen is not me:
            self.current = chosen
            chosen.gate.release()
            me.gate.acquire()
        me.ready = None
        if me.context.is_dead:
            raise Killed
        self._quiet += 1
        if self._quiet > self.most_accesses:
            raise Stuck

    def sleep(self, seconds: float) -> None:
        self.pause(self.now_s + max(seconds, 0.0))

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Have something happen at a moment."""
        heapq.heappush(self._events, (time_s, next(self._count), act))

    def _next(self) -> Thread:
        while True:
            while self._events and self._events[0][0] <= self.now_s:
                heapq.heappop(self._events)[2]()
            able = [thread for thread in self.threads if self._is_able(thread)]
            if able:
                return able[0] if len(able) == 1 else self.rng.choice(able)
            times_s = [
                thread.until_s
                for thread in self.threads
                if not thread.done and not thread.context.is_suspended
            ]
            if self._events:
                times_s.append(self._events[0][0])
            next_s = min(times_s)
            assert next_s < FOREVER, "nothing can ever run again"
            self.now_s = max(self.now_s, next_s)

    def _is_able(self, thread: Thread) -> bool:
        if thread.done:
            return False
        if thread.context.is_dead:
            return True
        if thread.context.is_suspended:
            return False
        return thread.until_s <= self.now_s or (thread.ready is not None and thread.ready())

    def _finish(self, thread: Thread) -> None:
        self.threads.remove(thread)
        self.current = self._next()
        self.current.gate.release()

    # Accesses

    def access(self, label: str) -> str | None:
        """The running thread does something to the world; what a trap says of it, for the place to
        act on.
        """
        me = self.current
        if me.context.is_dead:
            raise Killed
        self.accesses += 1
        if self.accesses > self.most_accesses:
            raise Stuck
        if self.traces_accesses:
            self.say(f"  {me.context.name}: {label}")
        verdict = None
        if self.traps:
            for trap in list(self.traps):
                if label.startswith(trap.label) and trap.process in (None, me.process.root.name):
                    trap.countdown -= 1
                    if trap.countdown <= 0:
                        self.traps.remove(trap)
                        self.say(f"at '{label}' of {me.process.root.name}:")
                        verdict = trap.act() or verdict
        if me.context.is_dead:
            raise Killed
        if me.context.is_suspended:
            self.pause(self.now_s)
        else:
            self._pass(_ACCESS_S)
        return verdict

    def _pass(self, seconds: float) -> None:
        """Let a little time go by; what can run then may."""
        until_s = self.now_s + seconds
        if self._events and self._events[0][0] <= until_s:
            self.pause(until_s)
            return
        self.now_s = until_s
        me = self.current
        if self.rng.random() < 0.3 and any(
            thread is not me and self._is_able(thread) for thread in self.threads
        ):
            self.pause(until_s)

    def say(self, words: str) -> None:
        self.trace.append(f"{self.now_s:9.4f} {words}")

    def end(self) -> None:
        """Let all threads but the test's own come to their end."""
        self._events.clear()
        self.traps.clear()
        for thread in self.threads:
            if thread is not self.current:
                thread.process.killed = True
        while len(self.threads) > 1:
            self.pause(self.now_s + 1.0)


class Lock:
    """``threading.Lock`` and ``RLock``."""

    def __init__(self, world: World, again: bool = False) -> None:
        self._world = world
        self._again = again
        self._owner: Thread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = self._world.current
        if self._owner is me and self._again:
            self._depth += 1
            return True
        if self._owner is not None and self._owner.done:
            self._owner = None
        if self._owner is not None:
            if not blocking:
                return False
            until_s = FOREVER if timeout < 0 else self._world.now_s + timeout
            self._world.pause(until_s, lambda: self._owner is None or self._owner.done)
            if self._owner is not None and not self._owner.done:
                return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._owner = None

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """``threading.Event``."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            until_s = FOREVER if timeout is None else self._world.now_s + timeout
            self._world.pause(until_s, self.is_set)
        return self._set


class Carrier(threading.Thread):
    """A real thread that carries simulated ones, one after another; starting one anew costs too
    much.
    """

    def __init__(self) -> None:
        super().__init__(name="simulation", daemon=True)
        self.wake = threading.Lock()
        self.wake.acquire()
        self.job: tuple[threading.Lock, Callable[[Callable[[], None]], None]] | None = None

    def run(self) -> None:
        while True:
            self.wake.acquire()
            assert self.job is not None
            gate, work = self.job
            gate.acquire()
            self.job = None
            work(lambda: _idle.append(self))


_idle: list[Carrier] = []


def _carry(gate: threading.Lock, work: Callable[[Callable[[], None]], None]) -> None:
    if _idle:
        carrier = _idle.pop()
    else:
        carrier = Carrier()
        carrier.start()
    carrier.job = (gate, work)
    carrier.wake.release()
