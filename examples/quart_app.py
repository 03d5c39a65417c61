"""Limits in Quart. Run it with `python examples/quart_app.py`, then ask it: `curl -i localhost:8000/report`."""

import os

import uvicorn
from quart import Quart, Response, request

from headgate import AsyncLimiter, RateLimited
from headgate.http.asgi import RateLimitMiddleware, raised_answer

app = Quart(__name__)
app.asgi_app = RateLimitMiddleware(app.asgi_app, "100/minute", exempt=["/health"])
reports = AsyncLimiter("3/minute")


@app.errorhandler(RateLimited)
async def refused(error):
    answer = raised_answer(request.scope, error)
    return Response(answer.body, answer.status, dict(answer.headers))


@app.get("/")
async def home():
    return "hello"


@app.get("/report")
@reports.guard(key=lambda: request.remote_addr)  # a limit of the view, below the route
async def report():
    return "report"


@app.get("/health")
async def health():
    return "well"


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))
