"""Rate limits for HTTP applications and clients: middleware, decorators, key functions and response fields.

- `headgate.http.asgi`: RateLimitMiddleware for any ASGI application (Starlette, Litestar, Quart, …)
- `headgate.http.fastapi`: limit, exempt and install for FastAPI
- `headgate.http.aiohttp`: install, limit and exempt for aiohttp's server
- `headgate.http.flask`: install, limit and exempt for Flask
- `headgate.http.django`: rate_limits (the middleware), limit and exempt for Django
- `headgate.http.rest_framework`: throttle for Django REST framework
- `headgate.http.wsgi`: RateLimitMiddleware for any WSGI application (Bottle, Pyramid, …)
- `headgate.http.client`: rate limits for outgoing requests: transports for httpx, an adapter for requests
- `headgate.http.testing`: fresh_limits and limits_off, for testing applications with limits
"""

from headgate.http.address import Proxies, client_address, peer_key
from headgate.http.headers import Headers, Writer
from headgate.http.keys import by_address, by_all, by_header, by_route, by_user
from headgate.http.problems import Answer, problem, refusal, too_costly

__all__ = [
    "Answer",
    "Headers",
    "Proxies",
    "Writer",
    "by_address",
    "by_all",
    "by_header",
    "by_route",
    "by_user",
    "client_address",
    "peer_key",
    "problem",
    "refusal",
    "too_costly",
]
