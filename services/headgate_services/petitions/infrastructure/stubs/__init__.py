"""Stubs for tests."""

from headgate_services.petitions.infrastructure.stubs.rate_limiter_stub import RateLimiterStub

__all__ = ["RateLimiterStub"]
