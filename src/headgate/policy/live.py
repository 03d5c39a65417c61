"""Policies that follow their file: the code that threads and coroutines share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from headgate._checks import Unpicklable, check_kind, is_number
from headgate._fork import watch
from headgate.algorithms import algorithm_for
from headgate.clock import Clock, check_clock
from headgate.errors import ConfigError, HeadgateError, listed
from headgate.hooks import Hook, Hooks, logger
from headgate.observe.redaction import redact
from headgate.policy.explain import describe_changes
from headgate.policy.limiters import call_listeners
from headgate.policy.load import parse_policy, policy_path, read_policy
from headgate.policy.model import LimiterPolicy, Policy, PolicyError
from headgate.rules import Rule, rules_from
from headgate.stores import MemoryStore, open_handle
from headgate.stores.base import check_entries
from headgate.stores.handle import StoreHandle

L = TypeVar("L")

Candidates = Callable[[str, tuple[Rule, ...]], Mapping[str, Rule]]
"""Returns the candidates for the rules of a limiter, from its name and rules."""


class LiveLimiters(Unpicklable, Mapping[str, L]):
    """The limiters of a policy by name, and its file; subclasses define the types of limiters."""

    _version_type: ClassVar[Callable[..., Any]]
    """A limiter of one version of the policy."""
    _limiter_type: ClassVar[Callable[..., Any]]
    """A limiter that always decides by the newest version."""

    def __init__(
        self,
        policy: Policy,
        *,
        hooks: Iterable[Hook] = (),
        shadow_hooks: Iterable[Hook] = (),
        clock: Clock | None = None,
    ) -> None:
        self.last_error: str | None = None
        self._hooks = Hooks(hooks) if hooks else None
        self._shadow_hooks = Hooks(shadow_hooks)
        self.clock = check_clock(clock)
        self._path: Path | None = None
        self._environment: Mapping[str, str] | None = None
        self._seen: tuple[str, str] | None = None
        self._handles: dict[str, StoreHandle] = {}
        self._ever: dict[str, Any] = {}
        self._limiters: dict[str, L] = {}
        self._listeners: list[Callable[[], None]] = []
        self._beside: Candidates = lambda name, rules: {}
        self._reloading = watch(threading.RLock())
        self._reloader: threading.Thread | None = None
        expected = f"a Policy, as {type(self).__name__}.from_file('headgate.toml') reads from a file"
        self.policy = check_kind("policy", policy, Policy, expected)
        try:
            self._use(policy)
        except BaseException:
            for handle in self._handles.values():
                handle.close()
            raise

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        environment: Mapping[str, str] | None = None,
        *,
        hooks: Iterable[Hook] = (),
        shadow_hooks: Iterable[Hook] = (),
        clock: Clock | None = None,
    ) -> Self:
        """Return the live policy of a file.

        Args:
            path: The file.
            environment: Variables that may replace single values, usually `os.environ`; by default none.
            hooks: See the class, also for the other arguments.

        Raises:
            PolicyError: The file cannot be read or is invalid.
        """
        file = policy_path(path)
        seen = _read_or_error(file)
        policy = _parse(file, seen, environment)
        try:
            live = cls(policy, hooks=hooks, shadow_hooks=shadow_hooks, clock=clock)
        except PolicyError as error:
            raise PolicyError(f"{file}: {error}") from error
        live._path, live._environment, live._seen = file, environment, seen
        return live

    def __getitem__(self, name: str) -> L:
        try:
            return self._limiters[name]
        except KeyError:
            raise KeyError(f"the policy has no limiter {name!r}; it has {listed(self._limiters)}") from None

    def get(self, name: object, default: Any = None) -> Any:
        return self._limiters.get(name, default)  # type: ignore[call-overload]  # much faster than `Mapping.get`

    def __iter__(self) -> Iterator[str]:
        return iter(self._limiters)

    def __len__(self) -> int:
        return len(self._limiters)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(self._limiters)}>"

    @property
    def follows_file(self) -> bool:
        """Whether there is a file to reload and watch."""
        return self._path is not None

    def on_change(self, tell: Callable[[], None]) -> None:
        """Register a function to be called after every reload that changed something, on the thread that reloads."""
        self._listeners.append(tell)

    def watch_beside(self, candidates_for: Candidates) -> None:
        """Add shadow rules that are not in the file, as candidates to replace live rules; a reload keeps them.

        Args:
            candidates_for: Called with the name and the live rules of each limiter; returns the candidates to add, by the
                name of the live rule. Invalid candidates are skipped with a warning.
        """
        with self._reloading:
            self._beside = candidates_for
            self._use(self.policy)

    def reload(self) -> bool:
        """Read the file again, and return whether anything changed. Any thread may call it.

        New limits apply at once, with the existing counts.

        Raises:
            PolicyError: The file cannot be read or is invalid, or this thread is reloading it already (in a signal handler);
                the previous policy stays in force.
        """
        file = self._followed()
        with self._reloading:
            if self._reloader is threading.current_thread():
                raise PolicyError(f"{file} is being reloaded by this thread already")
            self._reloader = threading.current_thread()
            try:
                changed = self._renew(file)
            except PolicyError as error:
                self.last_error = str(error)
                raise
            finally:
                self._reloader = None
            self.last_error = None
        if changed:
            logger.info("%s is in force: %s", file, "; ".join(changed))
            call_listeners(self._listeners)
        return bool(changed)

    def poll(self) -> None:
        """Reload if the file has changed, as `watch` does every second; log errors instead of raising them."""
        file, known = self._followed(), self.last_error
        try:
            if _read_or_error(file) != self._seen and not self.reload() and known is not None:
                logger.info("%s is valid again, without changes", file)
        except PolicyError as error:
            if str(error) != known:
                logger.error("the policy stays as it was: %s", error)
        except Exception as error:  # noqa: BLE001  # keep watching: the next version of the file may be valid
            self.last_error = redact(repr(error))
            if self.last_error != known:
                logger.exception("the policy stays as it was: unexpected error")

    def _followed(self) -> Path:
        if self._path is None:
            raise PolicyError("this policy has no file; create it with from_file")
        return self._path

    def _renew(self, file: Path) -> list[str]:
        """Apply the current policy of the file, and return descriptions of the changes."""
        self._seen = _read_or_error(file)
        policy = _parse(file, self._seen, self._environment)
        lost = self.policy.limiters.keys() - policy.limiters.keys()
        if lost and not policy.allow_removal:
            names = ", ".join(map(repr, sorted(lost)))
            raise PolicyError(
                f"{file}: {names} would be removed; if the file is complete, write allow_removal = true at its top"
            )
        changed = describe_changes(self.policy, policy)
        try:
            self._use(policy)
        except PolicyError as error:
            self._seen = None  # the cause may be outside of the file, so try again later
            raise PolicyError(f"{file}: {error}") from error
        return changed

    def _use(self, policy: Policy) -> None:
        """Apply a policy, or raise and change nothing."""
        versions = {name: self._watched(limiter) for name, limiter in policy.limiters.items()}
        # From here on nothing can fail.
        for name in self._limiters.keys() - versions.keys():
            logger.warning(
                "limiter %r is no longer in the policy; code that still has it can use it unchanged", name
            )
        self._limiters = {name: self._limiter(version) for name, version in versions.items()}
        self.policy = policy

    def _watched(self, policy: LimiterPolicy) -> Any:
        """Return the version of a limiter, with the shadow rules that are not in the file if its store accepts them."""
        try:
            if added := self._beside(policy.name, policy.rules):
                rules_from([*policy.rules, *policy.shadow, *added.values()])
                names = {candidate.name: rule for rule, candidate in added.items()}
                shadow = (*policy.shadow, *added.values())
                return self._version(replace(policy, shadow=shadow, candidate_for=names))
        except ConfigError as error:
            logger.warning("limiter %r: candidates were not added: %s", policy.name, error)
        return self._version(policy)

    def _version(self, policy: LimiterPolicy) -> Any:
        known = self._ever.get(policy.name)
        before = None if known is None else known.current
        if before is not None and before.policy == policy:
            return before
        try:
            store = self._store(policy.store)
            _check_overrides(policy, shared=store.guarantees.shared)
            # A memory store has the clock already; other stores receive its time with every call.
            clock = None if isinstance(store, MemoryStore) else self.clock
            return self._version_type(policy, store, clock, self._hooks, self._shadow_hooks, before)
        except HeadgateError as error:
            raise PolicyError(f"limiter {policy.name!r}: {redact(str(error))}") from error

    def _limiter(self, version: Any) -> Any:
        """Return the limiter of a version: a new one, or the existing one with the new version."""
        limiter = self._ever.get(version.name)
        before = None if limiter is None else limiter.store
        if limiter is None:
            limiter = self._ever[version.name] = self._limiter_type(version)
        elif limiter.current is not version:
            limiter._use(version)
        if self._hooks is not None and limiter.store is not before:
            self._hooks.attached(limiter)
        return limiter

    def _store(self, url: str) -> Any:
        """Return the store of a URL; all limiters of the policy share it, even in memory."""
        if url not in self._handles:
            is_memory = url.partition(":")[0].lower() == "memory"
            make = partial(MemoryStore, clock=self.clock)
            self._handles[url] = StoreHandle(make) if is_memory else open_handle(url)
        return self._handles[url].store


class Watching:
    """A thread that watches a policy file; it ends with `stop`, with its `with` block, or with the process."""

    def __init__(self, poll: Callable[[], None], every: float) -> None:
        self._poll = poll
        self._every = every
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headgate-policy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for its end. Any thread may call this, more than once."""
        self._stopping.set()
        # A listener may call this method in the thread itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self._every):
            self._poll()

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


class AsyncWatched(LiveLimiters[L]):
    """A policy that a task keeps up to date with its file."""

    async def watch(self, every: float = 1.0) -> None:
        """Reload whenever the file changes, until cancelled.

        An invalid file is logged and reported in `last_error`; the previous policy stays in force.

        Args:
            every: Seconds between two reads of the file.

        Raises:
            ConfigError: `every` is not a positive number.
        """
        self._followed()
        _check_pause(every)
        while True:
            await asyncio.sleep(every)
            self.poll()


class Watched(LiveLimiters[L]):
    """A policy that a thread keeps up to date with its file."""

    def watch(self, every: float = 1.0) -> Watching:
        """Reload whenever the file changes, in a thread that ends with `stop()` or its `with` block.

        An invalid file is logged and reported in `last_error`; the previous policy stays in force.

        Args:
            every: Seconds between two reads of the file.

        Raises:
            ConfigError: `every` is not a positive number.
        """
        self._followed()
        _check_pause(every)
        return Watching(self.poll, every)


def _read_or_error(file: Path) -> tuple[str, str]:
    """Return the text of a policy file and no error, or no text and the error."""
    try:
        return read_policy(file), ""
    except PolicyError as error:
        return "", str(error)


def _parse(file: Path, seen: tuple[str, str], environment: Mapping[str, str] | None) -> Policy:
    text, error = seen
    if error:
        raise PolicyError(error)
    return parse_policy(text, str(file), environment)


def _check_overrides(policy: LimiterPolicy, *, shared: bool) -> None:
    """Refuse overrides that the store could not count exactly."""
    rules = {rule.name: rule for rule in (*policy.rules, *policy.shadow)}
    for quotas in policy.overrides.values():
        for name, quota in quotas.items():
            algorithm_for(rules[name], quota)
            if shared:
                check_entries(rules[name], quota)


def _check_pause(every: float) -> None:
    if not is_number(every) or not 0 < every <= threading.TIMEOUT_MAX:  # also false for NaN
        raise ConfigError(f"every= is seconds above 0, not {every!r}")
