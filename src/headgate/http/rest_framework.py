"""Limits for Django REST framework, as throttle classes.

    Reports = throttle("20/day", key=by_user)

    class ReportView(APIView):
        throttle_classes = [Reports]

The body of a refusal is the framework's own; all responses of the view carry the fields. Raised refusals (for example from
`guard`) are answered by the middleware `headgate.http.django.rate_limits`, which `count=` and `concurrent` rules also need.

The throttles of a view are checked in order. After a refusal, the throttles that follow are not charged. Throttles in
`throttle_classes` replace limits of the site with `default=True`, like any limit of a view.
"""

from __future__ import annotations

from typing import Any, Unpack

from headgate import Limiter, Rule
from headgate._extras import needing
from headgate.errors import ConfigError, CostTooHigh
from headgate.http.django import DjangoLimit, outer_exchange, scope_of
from headgate.http.headers import put_fields
from headgate.http.limit import ViewOptions, on_scope
from headgate.http.problems import TOO_LARGE, UNAVAILABLE
from headgate.http.view_limits import MARK
from headgate.http.wsgi import decide, is_preflight

with needing("headgate.http.rest_framework", "rest-framework"):
    from rest_framework.exceptions import APIException
    from rest_framework.throttling import BaseThrottle

__all__ = ["HeadgateThrottle", "throttle"]


def throttle(
    *rules: str | Rule | Limiter,
    **options: Unpack[ViewOptions],
) -> type[HeadgateThrottle]:
    """Return a throttle class; all views that use it share one count.

    The arguments are those of `headgate.http.django.limit`. On a shared store it needs a name.
    """
    seen = on_scope(options, scope_of)
    declared = DjangoLimit(rules, False, seen)
    declared.use_settings()
    if declared.lacks_name:
        raise ConfigError(
            "a throttle on a given store needs a name=, to keep its counts separate from others"
        )
    return type("Throttle", (HeadgateThrottle,), {"limit": declared.limit_for(Limiter), MARK: (declared,)})


class HeadgateThrottle(BaseThrottle):  # type: ignore[misc]  # untyped base class
    """A throttle that checks a limiter; created by `throttle`."""

    limit: Any
    _wait: float | None = None

    def allow_request(self, request: Any, view: Any) -> bool:
        """Return whether a request is admitted."""
        limit = self.limit
        if is_preflight(request._request.META) or (limit.exempt is not None and limit.exempt(request)):
            return True
        exchange = outer_exchange(request._request)  # reading META through the framework's request is slower
        before = getattr(view, "headgate_asked", ()) if exchange is None else exchange.asked
        if before and not before[-1][1].allowed:
            return True  # REST framework calls every throttle, even after a refusal
        try:
            asked = decide(limit, request, exchange)
        except CostTooHigh as error:
            raise _error(TOO_LARGE, "This request costs more than is ever admitted at once.") from error
        if exchange is not None:
            exchange.asked.append(asked)
        else:
            every = view.headgate_asked = [*before, asked]
            put_fields(view.headers, every)  # the view copies them to its response
        decision = asked[1]
        if decision.allowed:
            return True
        if decision.degraded:
            raise _error(UNAVAILABLE, "Requests cannot be counted at the moment.")
        self._wait = decision.retry_after
        return False

    def wait(self) -> float | None:
        """Return the seconds to wait after a refusal; `None` if waiting does not help."""
        return self._wait


def _error(status: int, detail: str) -> APIException:
    error = APIException(detail)
    error.status_code = status
    return error
