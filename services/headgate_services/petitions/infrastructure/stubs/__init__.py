"""Stand-ins for tests; the running service uses none of them."""

from headgate_services.petitions.infrastructure.stubs.rate_limiter_stub import RateLimiterStub

__all__ = ["RateLimiterStub"]
