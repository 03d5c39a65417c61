"""An outbound e-mail gateway with a global send limit.

`headgate run mail` starts it; `create_app` returns the application for another server or a test.
"""

from headgate_services.mail.app import create_app, main
from headgate_services.mail.config import Settings
from headgate_services.mail.rate_limiter import GlobalRateLimiter, RateLimitResult

__all__ = [
    "GlobalRateLimiter",
    "RateLimitResult",
    "Settings",
    "create_app",
    "main",
]
