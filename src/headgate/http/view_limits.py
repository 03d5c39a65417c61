"""Limits declared before their view or route is known: decorators of views, dependencies of routes.

A limiter on a shared store needs a name. If none is given, it is taken from the view or route, which is known only later.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from headgate import AsyncLimiter, Limiter, MemoryStore
from headgate.errors import ConfigError
from headgate.http.limit import LimitDefaults, RequestLimit, ViewOptions, has_already, rule_of, split_options
from headgate.rules import rules_from

Marked = TypeVar("Marked")
Found = TypeVar("Found", bound="DeclaredLimit")

MARK = "headgate_limits"
"""Attribute with the limits of a view or group of views, in order; `None` in the tuple marks an exemption."""


class DeclaredLimit:
    """Rules and options from which the `RequestLimit` is created once its view is known.

    Args:
        rules: Rules, or text, or one limiter.
        default: Whether a limit nearer to the route replaces this one.
        options: The arguments of `RequestLimit` and of the limiter.
    """

    def __init__(self, rules: tuple[object, ...], default: bool, options: ViewOptions) -> None:
        given = [rule for rule in rules if isinstance(rule, Limiter | AsyncLimiter)]
        if not rules or (given and len(rules) > 1):
            raise ConfigError("give a limit either rules, like '5/minute', or one limiter")
        self._options, self._limiter_options = split_options(options)
        if given and self._limiter_options:
            raise ConfigError(has_already(self._limiter_options))
        self.default = default
        self._limiter = given[0] if given else None
        self._rules = () if given else rules_from(tuple(rule_of(rule, Limiter) for rule in rules))
        self._has_own_name = bool(self._limiter_options.get("name"))
        self.name = self._limiter_options.get("name") or None
        # Sync and async views that share a limit count together.
        self._memory = MemoryStore(clock=self._limiter_options.get("clock"))
        self._limits: dict[type, RequestLimit[Any]] = {}
        self._has_defaults = False

    def use_defaults(self, defaults: LimitDefaults) -> None:
        """Use the defaults of an application for everything that was not given; only the first call has an effect."""
        if self._has_defaults or not defaults or self._limiter is not None:
            return
        self._has_defaults = True
        self._limiter_options = {**split_options(defaults)[1], **self._limiter_options}
        self._limits.clear()

    @property
    def lacks_name(self) -> bool:
        """Whether the limiter cannot be created yet because it has no name."""
        return "store" in self._limiter_options and self.name is None

    def named(self, name: str, kind: type) -> RequestLimit[Any]:
        """Name the limiter if it needs a name, and return its limit, see `limit_for`."""
        takes_name = "store" in self._limiter_options and not self._has_own_name
        if takes_name and self.name not in (None, name):
            raise ConfigError(f"a limit of both {self.name} and {name}, on a given store, needs a name=")
        self.name = self.name or name
        return self.limit_for(kind)  # reports configuration errors immediately

    def mark(self, limited: Any, view: Any) -> None:
        """Record that `limited` is `view` with this limit."""
        setattr(limited, MARK, (*getattr(view, MARK, ()), self))
        _without_limit[id(view)] = view

    def limit_for(self, kind: type) -> RequestLimit[Any]:
        """Return the limit for a limiter class, `Limiter` or `AsyncLimiter`; created on the first call."""
        found = self._limits.get(kind)
        if found is None:
            found = self._limits[kind] = self._made(kind)
        return found

    def _made(self, kind: type) -> RequestLimit[Any]:
        limiter: Any = self._limiter
        if limiter is None:
            options: Any = {"store": self._memory, **self._limiter_options, "name": self.name or "private"}
            limiter = kind(*self._rules, **options)
        elif not isinstance(limiter, kind):
            rule_of(limiter, kind)  # raises an error that names the expected type
        made = RequestLimit(limiter, **self._options)
        if made.awaits and kind is Limiter:
            raise ConfigError("coroutine functions are for limits of ASGI frameworks and async views")
        return made


_without_limit: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The undecorated views by id, since not all views are hashable. Views found in place are removed."""

_views_of: weakref.WeakKeyDictionary[Any, Callable[[Any], Iterable[Any]]] = weakref.WeakKeyDictionary()
"""Applications with limits, each with a function that returns its views."""


def watch(app: Any, views_of: Callable[[Any], Iterable[Any]]) -> None:
    """Include the views of an application when the order of decorators is checked."""
    _views_of[app] = views_of


def check_order(views: Iterable[Any]) -> bool:
    """Raise `ConfigError` if a view was registered without its limit, because the decorators are in the wrong order.

    A function that is still the module's attribute of that name, or that some application registered with its limit, was
    registered without a limit on purpose.

    Returns:
        Whether every view with a limit is in place, so that nothing is left to check.
    """
    registered = list(views)
    known = [view for app, views_of in list(_views_of.items()) for view in list(views_of(app))]
    for view in (*registered, *known):
        for inner in _wrapped_by(view):
            _without_limit.pop(id(inner), None)
    for view in registered:
        if _without_limit.get(id(view)) is not view:
            continue
        name = getattr(view, "__name__", "")  # a partial has no name
        if getattr(sys.modules.get(view.__module__), name, None) is not view:
            raise ConfigError(f"write @limit(…) below the decorator of the route, next to {name or view!r}")
    return not _without_limit


def _wrapped_by(view: Any) -> Iterator[Any]:
    # Read __dict__ instead of getattr: some objects return a value for every attribute name.
    while (view := getattr(view, "__dict__", {}).get("__wrapped__")) is not None:
        yield view


def exempt(view: Marked) -> Marked:
    """Exempt a view, or a group of views, from the limits of its application and groups."""
    setattr(view, MARK, (None, *getattr(view, MARK, ())))
    return view


def in_force(found: Iterable[Found | None]) -> list[Found]:
    """Return the limits in force on a route, given the limits of its application, its groups and itself, in this order.

    `None` is an exemption and drops all limits before it. Of the default limits, only the last applies, and only if there
    are no other limits.
    """
    limits: list[Found] = []
    for limit in found:
        limits = [] if limit is None else [*limits, limit]
    return [limit for limit in limits if not limit.default] or limits[-1:]


def limits_around(outer: Iterable[Found], view: Any, method: str | None) -> list[Found]:
    """Return the limits of an application or group that are in force on a view, without the view's own limits."""
    own = tuple(_limits_of(view, (method or "").lower()))
    return [one for one in in_force([*outer, *own]) if one not in own]


def _limits_of(view: Any, method: str) -> Iterator[Any]:
    """Yield the limits of a view; for a class-based view also the limits of its method and of its throttles."""
    yield from getattr(view, MARK, ())
    kind = class_of(view)
    if kind is None:
        return
    actions = getattr(view, "actions", None) or {}  # a ViewSet maps HTTP methods to method names
    names = (method, "get") if method == "head" else (method,)
    handlers = (getattr(kind, actions.get(name, name), None) for name in names)
    yield from getattr(next(filter(None, handlers), None), MARK, ())
    given = getattr(view, "initkwargs", {}).get("throttle_classes")
    for throttle in getattr(kind, "throttle_classes", ()) if given is None else given:
        yield from getattr(throttle, MARK, ())


def class_of(view: Any) -> Any:
    """Return the class of a class-based view in Flask, Django or REST framework; `None` for other views."""
    return getattr(view, "view_class", None) or getattr(view, "cls", None)
