"""Hooks that `headgate._fork` calls before and after a fork."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headgate import Limiter, MemoryStore, SQLiteStore, _fork
from headgate._fork import watch
from tests.unit.processes import Interruptions, forking, in_child

pytestmark = forking

PATIENCE = 30  # seconds after which a test that hangs fails


@pytest.fixture(autouse=True)
def isolated_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watch only the objects of the test."""
    monkeypatch.setattr(_fork, "_watched", type(_fork._watched)())


class Watched:
    """Records which of its hooks were called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name = name
        self.calls = calls
        watch(self)

    def before_fork(self) -> None:
        self.calls.append(f"before {self.name}")

    def after_fork_in_parent(self) -> None:
        self.calls.append(f"parent {self.name}")

    def after_fork_in_child(self) -> None:
        self.calls.append(f"child {self.name}")


class Guarded:
    """Has a lock that a fork must not copy while it is held."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        watch(self)

    def before_fork(self) -> None:
        self.lock.acquire()

    def after_fork_in_parent(self) -> None:
        if self.lock.locked():
            self.lock.release()

    def after_fork_in_child(self) -> None:
        self.lock = threading.Lock()


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """The exceptions that reached no caller and were reported by the interpreter."""
    errors: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda raised: errors.append(raised.exc_value))
    return errors


# --- Calls of hooks --------------------------------------------------------------------------------------------------


def test_hooks_are_called_in_order_before_and_in_reverse_after_a_fork() -> None:
    calls: list[str] = []
    objects = [Watched(name, calls) for name in "abc"]
    assert in_child(lambda: calls == ["before a", "before b", "before c", "child c", "child b", "child a"])
    assert calls == ["before a", "before b", "before c", "parent c", "parent b", "parent a"]
    assert len(objects) == 3


def test_a_child_can_fork_as_well() -> None:
    calls: list[str] = []
    watched = Watched("a", calls)

    def work() -> bool:
        return (
            in_child(lambda: calls == ["before a", "child a", "before a", "child a"]) and watched is not None
        )

    assert in_child(work)


def test_an_object_need_not_have_every_hook() -> None:
    class Plain:
        pass

    class OnlyInChild:
        was_called = False

        def after_fork_in_child(self) -> None:
            self.was_called = True

    watched, plain = watch(OnlyInChild()), watch(Plain())
    assert in_child(lambda: watched.was_called and plain is not None)
    assert not watched.was_called


def test_collected_object_is_neither_called_nor_kept_alive() -> None:
    calls: list[str] = []
    kept, gone = Watched("kept", calls), Watched("gone", calls)
    del gone
    gc.collect()
    assert in_child(lambda: calls == ["before kept", "child kept"])
    assert len(_fork._watched) == 1
    assert kept.calls is calls


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock, threading.Condition])
def test_a_watched_lock_is_free_in_the_child(make: Callable[[], Any]) -> None:
    lock = watch(make())
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            may_end.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(PATIENCE)
    try:
        assert in_child(lambda: lock.acquire(blocking=False))
        assert not lock.acquire(blocking=False), "it is still held in the parent"
    finally:
        may_end.set()
        thread.join()


# --- Errors and interruptions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["before_fork", "after_fork_in_parent"])
def test_hooks_after_a_fork_complete_an_interrupted_hook(hook: str, ignored: list[BaseException]) -> None:
    calls: list[str] = []
    objects = [Watched(name, calls) for name in "abc"]
    usual = getattr(objects[1], hook)

    def interrupted() -> None:
        setattr(objects[1], hook, usual)
        raise InterruptedError

    setattr(objects[1], hook, interrupted)
    assert in_child(lambda: [call for call in calls if "child" in call] == ["child c", "child b", "child a"])
    prepared = [call[-1] for call in calls if "before" in call]
    assert {"b", *prepared} == {call[-1] for call in calls if "parent" in call}
    assert len(ignored) == 1


def test_signal_handler_that_raises_at_any_time_skips_no_hook(
    interruptions: Interruptions, ignored: list[BaseException]
) -> None:
    """Call the hooks like the interpreter: an error in one of them is reported, and the next one is called."""
    held: set[int] = set()

    class Holding:
        def before_fork(self) -> None:
            held.add(id(self))

        def after_fork_in_parent(self) -> None:
            held.discard(id(self))

    objects = [watch(Holding()) for _ in range(20)]
    remaining: list[Callable[[], None]] = []

    def fork_in_parent() -> None:
        remaining[:] = [_fork._before, _fork._after_in_parent, _fork._after_in_parent]
        while remaining:
            hook = remaining[0]
            del remaining[0]
            hook()

    for _ in interruptions(fork_in_parent):
        for hook in tuple(remaining):
            hook()
        assert not held
    assert len(objects) == 20


# --- Forks during other calls ----------------------------------------------------------------------------------------


def test_an_object_added_after_the_locks_were_taken_is_renewed_in_the_child_only() -> None:
    calls: list[str] = []
    first = Watched("first", calls)
    _fork._before()
    late = Watched("late", calls)
    _fork._after_in_parent()
    _fork._after_in_parent()
    assert calls == ["before first", "parent first"]
    calls.clear()
    _fork._before()
    later = Watched("later", calls)
    _fork._after_in_child()
    _fork._after_in_child()
    assert calls == ["before first", "before late", "child later", "child late", "child first"]
    assert (first.name, late.name, later.name) == ("first", "late", "later")


def test_forks_of_two_threads_are_independent() -> None:
    calls: list[str] = []
    watched = Watched("it", calls)

    def fork() -> None:
        for hook in (_fork._before, _fork._after_in_parent, _fork._after_in_parent):
            hook()

    _fork._before()
    other = threading.Thread(target=fork)
    other.start()
    other.join(PATIENCE)
    assert calls == ["before it", "before it", "parent it"]
    _fork._after_in_parent()
    _fork._after_in_parent()
    assert calls[3:] == ["parent it"]
    assert watched.calls is calls


def test_concurrent_forks_and_registrations_leave_no_lock_held(hasty_threads: None) -> None:
    objects = [Guarded() for _ in range(5)]
    results: list[bool] = []
    stop = threading.Event()

    def fork_often() -> None:
        for _ in range(8):
            results.append(in_child(lambda: all(each.lock.acquire(timeout=5) for each in tuple(objects))))  # noqa: PERF401

    def register_often() -> None:
        while not stop.wait(0.000_1):
            objects.append(Guarded())
            del objects[0]

    forks = [threading.Thread(target=fork_often, daemon=True) for _ in range(3)]
    registration = threading.Thread(target=register_often)
    for thread in (*forks, registration):
        thread.start()
    for thread in forks:
        thread.join(PATIENCE * 2)
    stop.set()
    registration.join()
    assert results == [True] * 24
    assert not any(guarded.lock.locked() for guarded in objects)


# --- Users of the hooks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [MemoryStore, lambda: SQLiteStore(":memory:")], ids=["memory", "sqlite"])
def test_fork_waiting_for_another_fork_releases_the_store(
    make: Callable[[], MemoryStore | SQLiteStore],
) -> None:
    with make() as store:
        limiter = Limiter("5/minute", name="x", store=store)
        is_ready = threading.Event()

        def fork_as_well() -> None:
            is_ready.set()
            store.before_fork()
            store.after_fork_in_parent()

        other = threading.Thread(target=fork_as_well)
        store.before_fork()
        other.start()
        is_ready.wait(PATIENCE)
        other.join(0.1)  # it waits for the lock now
        store.after_fork_in_parent()
        other.join(PATIENCE)
        asked = threading.Thread(target=limiter.hit, args=["ada"], daemon=True)
        asked.start()
        asked.join(PATIENCE)
        assert not asked.is_alive()


def test_nothing_is_registered_on_platforms_without_fork() -> None:
    program = "import os; del os.fork, os.register_at_fork; from headgate import _fork; print(_fork.watch(_fork) is _fork)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "True"


PACKAGE = Path(_fork.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
OTHER_LOCKS = {
    # Their objects have hooks of the fork.
    *(
        "_fair_queue.py",
        "leases/chunks.py",
        "stores/base.py",
        "stores/counters.py",
        "stores/remote/threads.py",
    ),
    "stores/sqlite_file.py",
    # Of one call, or of one hold.
    *("_concurrency.py", "_holding.py"),
    # Only for tests.
    *("testing/contract/races.py", "testing/postgres_server.py"),
}
"""Modules with a lock that is not watched itself."""


def test_hooks_are_registered_in_one_place() -> None:
    assert {name for name, text in SOURCES.items() if "os.register_at_fork(" in text} == {"_fork.py"}


def test_every_other_lock_is_watched() -> None:
    """Otherwise a child could wait without end for a thread of its parent."""
    lock = re.compile(r"(?<!watch\()threading\.(?:R?Lock|Condition|Semaphore)\(\)")
    found = {name for name, text in SOURCES.items() if name != "_fork.py" and lock.search(text)}
    assert found == OTHER_LOCKS
