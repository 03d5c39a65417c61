"""Formats of times in logs, converted to microseconds since the epoch.

10/Oct/2000:13:55:36 -0700       nginx $time_local, Apache %t
2024-05-01T12:00:00.123456Z      ISO 8601; digits below the microsecond are cut off
1714564800.123                   seconds; milli-, micro- and nanoseconds are distinguished by their size
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from headgate.clock import MAX_INSTANT, MICROSECONDS
from headgate_server.replay.errors import BadLine

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_LONGEST = 64
# Seconds reach 10^11 in the year 5138; 10^11 milliseconds were in 1973, and so on.
_SCALES = ((10**11, MICROSECONDS), (10**14, 1_000), (10**17, 1))


class TimeReader:
    """Reads the times of one log.

    Attributes:
        without_zone: Number of times without a time zone, which are read as UTC.
    """

    def __init__(self) -> None:
        self.without_zone = 0
        self._last = ("", 0)

    def read(self, value: object) -> int:
        """Return a time in microseconds since the epoch.

        Raises:
            BadLine: It is missing, invalid or out of range.
        """
        if isinstance(value, str):
            text, at = self._last
            if value != text or not text:  # successive lines often have the same second
                counted = self.without_zone
                at = self._parsed(value)
                if self.without_zone == counted:  # every time without a zone is counted
                    self._last = value, at
        elif isinstance(value, int | float) and not isinstance(value, bool):
            at = _from_number(value)
        else:
            raise BadLine("no time")
        if not 0 <= at < MAX_INSTANT * MICROSECONDS:
            raise BadLine("time before 1970 or after 2255")
        return at

    def _parsed(self, text: str) -> int:
        try:
            if len(text) > _LONGEST:
                raise ValueError
            if text[2:3] == "/":
                return _microseconds(datetime.strptime(text, "%d/%b/%Y:%H:%M:%S %z"))
            if text[4:5] == "-":
                return self._from_iso(text)
            return _from_digits(text)
        except (ValueError, OverflowError):
            raise BadLine("no time" if text in ("", "-") else "invalid time") from None

    def _from_iso(self, text: str) -> int:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            self.without_zone += 1
            moment = moment.replace(tzinfo=UTC)
        return _microseconds(moment)


def _microseconds(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND


def _from_digits(text: str) -> int:
    """Return the time of `1714564800.123`, without floating point."""
    if not text.isascii():
        raise ValueError
    whole, _, fraction = text.partition(".")
    if not whole.isdigit() or (fraction and not fraction.isdigit()):
        raise ValueError
    number = int(whole)
    scale = _scale(number)
    return (
        number * scale + int((fraction + "000000")[:6]) * scale // MICROSECONDS if scale else number // 1_000
    )


def _from_number(number: float) -> int:
    if number != number or abs(number) > 1e19:
        raise BadLine("invalid time")
    scale = _scale(number)
    return round(number * scale) if scale else int(number) // 1_000


def _scale(number: float) -> int:
    """Return the microseconds per unit for a number of this size; 0 for nanoseconds."""
    return next((scale for below, scale in _SCALES if number < below), 0)
