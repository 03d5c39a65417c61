"""A token-bucket middleware with tiers, in Redis, and a small service that uses it.

`headgate run tiers` starts the service; `RateLimitMiddleware` works with any ASGI application.
"""

from headgate_services.tiers.app import create_app, main
from headgate_services.tiers.bucket import Outcome
from headgate_services.tiers.config import TiersSettings
from headgate_services.tiers.limits import DEFAULT_RATE_LIMITS, TierLimit
from headgate_services.tiers.log import _redact_redis_credentials
from headgate_services.tiers.middleware import (
    RateLimitExceeded,
    RateLimitMiddleware,
    Standing,
    setup_rate_limiting,
)
from headgate_services.tiers.rate_limiter import TokenBucketRateLimiter

__all__ = [
    "DEFAULT_RATE_LIMITS",
    "Outcome",
    "RateLimitExceeded",
    "RateLimitMiddleware",
    "Standing",
    "TierLimit",
    "TiersSettings",
    "TokenBucketRateLimiter",
    "_redact_redis_credentials",
    "create_app",
    "main",
    "setup_rate_limiting",
]
