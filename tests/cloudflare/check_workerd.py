"""Tests of the adapter for Cloudflare's KV on a real workerd: `tools/test_cloudflare.sh`, needs Node.

The name does not begin with test_, so that `make test` needs no Node; there, the adapter is tested with replies written
from the documentation.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from headgate import StoreMisconfigured, StoreUnavailable
from headgate.stores.kv import cloudflare, purge
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate_services.telegram import ButtonPress, Message, TelegramSettings, create_app

HERE = Path(__file__).parent
ACCOUNT = "023e105f4ecef8ad9ca31a8372d0c353"
NAMESPACE = "0f2ac74b498b48028cb68387c421e279"
TOKEN = "Sn3lZJTBX6kkg7OdcBUAxOO963GEIyGQqnFTOFYY"


@pytest.fixture(scope="session")
def api_base() -> Iterator[str]:
    """Start workerd, and return the address of its API; the tests fail if it does not start."""
    command = ["node", "serve.mjs", ACCOUNT, NAMESPACE, TOKEN]
    with subprocess.Popen(
        command, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        lines = iter(server.stdout)
        address = next((line.split()[1] for line in lines if line.startswith("ready ")), None)
        assert address is not None, "workerd did not start; was `npm install` run here?"
        yield f"{address}/client/v4"
        server.stdin.close()


@pytest.fixture
async def kv(api_base: str) -> AsyncIterator[CloudflareKV]:
    kv = CloudflareKV(ACCOUNT, NAMESPACE, TOKEN, api_base=api_base)
    await purge(kv)
    yield kv
    await kv.aclose()


@pytest.fixture
async def other(api_base: str) -> AsyncIterator[CloudflareKV]:
    """An adapter that does not remember writes, so that it returns the stored values."""
    kv = CloudflareKV(ACCOUNT, NAMESPACE, TOKEN, api_base=api_base)
    yield kv
    await kv.aclose()


async def expiration(api_base: str, key: str) -> int:
    """Return the expiration time of a key, as listed by the namespace."""
    url = f"{api_base}/accounts/{ACCOUNT}/storage/kv/namespaces/{NAMESPACE}/keys"
    async with httpx.AsyncClient() as client:
        response = await client.get(url, headers={"Authorization": f"Bearer {TOKEN}"})
    (found,) = [entry["expiration"] for entry in response.json()["result"] if entry["name"] == key]
    return int(found)


@pytest.mark.parametrize(
    "key", ["ratelimit:42:472222", "a/b", "a b?c=d&e#f", "100%", "é\N{SNOWMAN}", "x" * 512]
)
async def test_stored_values_can_be_read_listed_and_deleted(
    key: str, kv: CloudflareKV, other: CloudflareKV
) -> None:
    assert await kv.get(key) is None
    await kv.put(key, "7 \n é", 60)
    assert await other.get(key) == "7 \n é"
    assert [name async for name in kv.list_keys(key[:2])] == [key]
    await kv.delete(key)
    assert [name async for name in kv.list_keys()] == []


async def test_the_time_to_live_is_kept(kv: CloudflareKV, api_base: str) -> None:
    before = int(time.time())
    await kv.put("key", "1", 3600)
    assert before + 3600 <= await expiration(api_base, "key") <= int(time.time()) + 3600


async def test_less_than_a_minute_is_refused(kv: CloudflareKV) -> None:
    with pytest.raises(StoreUnavailable, match=r"400.*at least 60"):
        await kv.put("key", "1", 59)


async def test_a_key_that_is_too_long_is_refused(kv: CloudflareKV) -> None:
    with pytest.raises(StoreUnavailable, match="414"):
        await kv.put("x" * 513, "1", 60)


async def test_a_wrong_token_is_refused(api_base: str) -> None:
    kv = CloudflareKV(ACCOUNT, NAMESPACE, "wrong", api_base=api_base)
    with pytest.raises(StoreMisconfigured, match="401"):
        await kv.get("key")
    await kv.aclose()


async def test_a_list_of_several_pages_is_followed(kv: CloudflareKV, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloudflare, "_KEYS_PER_PAGE", 10)
    keys = [f"key{number:02}" for number in range(25)]
    for key in keys:
        await kv.put(key, "1", 60)
    assert [key async for key in kv.list_keys("key")] == keys
    assert await purge(kv) == 25


@pytest.mark.parametrize("algorithm", ["fixed_window", "sliding_window"])
async def test_the_bot_dispatches_exactly_the_maximum(
    algorithm: str, kv: CloudflareKV, api_base: str
) -> None:
    dispatched: list[Message | ButtonPress] = []

    async def handler(event: Message | ButtonPress) -> None:
        dispatched.append(event)

    settings = TelegramSettings(
        TELEGRAM_BOT_TOKEN="1:token",
        TELEGRAM_WEBHOOK_SECRET="s3cret",
        TELEGRAM_API_BASE="http://127.0.0.1:1",
        ALLOWED_USER_IDS="42",
        RATE_LIMIT_KV="cloudflare",
        SEEN_UPDATES_KV="memory://",
        RATE_LIMIT_ALGORITHM=algorithm,
        RATE_LIMIT_WINDOW_MS=str(366 * 24 * 3_600_000),  # long, so that no window ends during the test
        CLOUDFLARE_ACCOUNT_ID=ACCOUNT,
        CLOUDFLARE_KV_NAMESPACE_ID=NAMESPACE,
        CLOUDFLARE_API_TOKEN=TOKEN,
        CLOUDFLARE_API_BASE=api_base,
    )
    app = create_app(settings, handler=handler)
    headers = {"X-Telegram-Bot-Api-Secret-Token": "s3cret"}
    sender = {"id": 42, "first_name": "Ada"}
    chat = {"id": 42, "type": "private"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://bot", headers=headers
        ) as client,
    ):
        responses = await asyncio.gather(
            *(
                client.post(
                    "/telegram/webhook",
                    json={
                        "update_id": n,
                        "message": {"message_id": n, "from": sender, "chat": chat, "text": "Hi"},
                    },
                )
                for n in range(50)
            )
        )
    assert {response.status_code for response in responses} == {200}
    assert len(dispatched) == 20
    (key,) = [key async for key in kv.list_keys()]
    assert key.startswith("ratelimit:42:")
    if algorithm == "fixed_window":
        assert await kv.get(key) == "20"
