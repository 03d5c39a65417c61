"""Limits in aiohttp's server. Run it with `python examples/aiohttp_app.py`, then ask it: `curl -i localhost:8000/`."""

import asyncio
import os

from aiohttp import web

from headgate.http.aiohttp import decision, exempt, install, limit

routes = web.RouteTableDef()


@routes.get("/")
async def home(request):
    return web.Response(text=f"{decision(request).remaining} left\n")


@routes.post("/login")
@limit("3/minute", count={401})  # only failed logins; below the route
async def login(request):
    if (await request.post())["password"] != "open sesame":
        raise web.HTTPUnauthorized
    return web.Response(text="welcome\n")


@routes.get("/health")
@exempt
async def health(request):
    return web.Response(text="well\n")


app = web.Application()
install(app, limit("100/minute", default=True))  # for handlers without a limit of their own
app.add_routes(routes)


async def main():
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(os.environ.get("PORT", "8000"))).start()
    host, port = runner.addresses[0]
    print(f"listens on http://{host}:{port}")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
