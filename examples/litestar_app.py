"""Limits in Litestar. Run it with `python examples/litestar_app.py`, then ask it: `curl -i localhost:8000/`."""

import os

import uvicorn
from litestar import Litestar, get, post
from litestar.exceptions import NotAuthorizedException
from litestar.middleware import DefineMiddleware

from headgate import RateLimited
from headgate.http.asgi import RateLimitMiddleware, answer_refusal


@get("/")
async def home() -> str:
    return "hello"


# A limit of the route, besides that of the application; only failed logins.
@post("/login", middleware=[DefineMiddleware(RateLimitMiddleware, limiter="3/minute", count={401})])
async def login(password: str = "") -> str:
    if password != "open sesame":
        raise NotAuthorizedException
    return "welcome"


@get("/health")
async def health() -> str:
    return "well"


handlers = {RateLimited: answer_refusal}  # for `guard`
app = RateLimitMiddleware(
    Litestar([home, login, health], exception_handlers=handlers), "100/minute", exempt=["/health"]
)

if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))
