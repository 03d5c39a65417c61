"""Stand-ins for tests; the running service uses none of them."""

from headgate.apps.petitions.infrastructure.stubs.rate_limiter_stub import RateLimiterStub

__all__ = ["RateLimiterStub"]
