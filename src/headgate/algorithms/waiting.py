"""The order of waiting callers: by priority shares, and first come, first served among equal priorities.

A new ticket gets a tag, and the ticket with the lowest tag is first; among equal tags the higher priority. While callers of
several priorities wait, each priority is served in proportion to its number: with 4 and 1, eight of ten callers have
priority 4. A ticket that is first stays first until it leaves, because a new tag is always higher. (This is start-time fair
queueing without packet lengths.)
"""

from __future__ import annotations

from headgate.errors import ConfigError

HIGHEST_PRIORITY = 10

DEFAULT_PRIORITY = 1

STRIDE = 2520
"""Distance of two tags with priority 1; every priority divides it."""


def next_tag(first: int, last: int, priority: int) -> int:
    """Return the tag of a new ticket.

    Args:
        first: The tag of the first ticket in the queue; 0 if the queue is empty.
        last: The tag of the last ticket with this priority; 0 if there is none.
        priority: The priority, from 1 to `HIGHEST_PRIORITY`.
    """
    return max(first, last) + STRIDE // priority


def check_priority(priority: object) -> int:
    """Return a checked `priority=`.

    Raises:
        ConfigError: It is not a whole number in the range.
    """
    if type(priority) is not int or not 1 <= priority <= HIGHEST_PRIORITY:
        raise ConfigError(f"priority= is a whole number from 1 to {HIGHEST_PRIORITY}, not {priority!r}")
    return priority
