"""Limits in FastAPI. Run it with `python examples/fastapi_app.py`, then ask it: `curl -i localhost:8000/login -d ''`."""

import os
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, HTTPException

from headgate import Decision
from headgate.http.fastapi import decision, exempt, install, limit

app = FastAPI(dependencies=[Depends(limit("100/minute", default=True))])  # for routes without their own
install(app)


@app.get("/")
async def home(found: Annotated[Decision, Depends(decision)]) -> str:
    return f"{found.remaining} left"


@app.post("/login", dependencies=[Depends(limit("3/minute", count={401}))])  # only failed logins
async def login(password: str = "") -> str:
    if password != "open sesame":
        raise HTTPException(401)
    return "welcome"


@app.get("/health", dependencies=[Depends(exempt)])
async def health() -> str:
    return "well"


if __name__ == "__main__":
    uvicorn.run(app, port=int(os.environ.get("PORT", "8000")))
