"""The adapter for Cloudflare's KV, against replies written from its documentation (see `cloudflare_server`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from headgate import (
    AsyncLimiter,
    ConfigError,
    Quota,
    Rule,
    StoreMisconfigured,
    StoreUnavailable,
    fixed_window,
    sliding_window,
)
from headgate.stores.kv import KVStore
from headgate.stores.kv.cloudflare import CloudflareKV
from headgate.testing import FakeClock
from tests.unit.kv.cloudflare_server import ACCOUNT, NAMESPACE, TOKEN, CloudflareServer

HOUR = 3600.0


class TestCalls:
    async def test_a_value_is_put_with_its_time_to_live(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        await cloudflare_kv.put("ratelimit:42:7", "1", 3600)
        assert cloudflare.value("ratelimit:42:7") == "1"
        assert cloudflare.expiration("ratelimit:42:7") == int(clock.now) + 3600

    async def test_list_keys_reads_all_pages(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer
    ) -> None:
        cloudflare.page_size = 2
        for number in range(5):
            await cloudflare_kv.put(f"key{number}", "1", 60)
        assert [key async for key in cloudflare_kv.list_keys("key")] == [
            f"key{number}" for number in range(5)
        ]
        assert cloudflare.calls.count(("GET", "keys")) == 3

    @pytest.mark.parametrize("missing", ["account", "namespace", "token"])
    @pytest.mark.parametrize("empty", [" ", None])
    def test_an_empty_secret_is_refused(self, missing: str, empty: Any) -> None:
        given = {"account": "a", "namespace": "n", "token": "t"} | {missing: empty}
        with pytest.raises(ConfigError, match=f"the {missing} is missing"):
            CloudflareKV(*given.values())


class TestRefusals:
    async def test_a_wrong_token_is_misconfigured_at_once(
        self, cloudflare_base: str, clock: FakeClock
    ) -> None:
        kv = CloudflareKV(ACCOUNT, NAMESPACE, "wrong", api_base=cloudflare_base, clock=clock)
        began = clock.now
        with pytest.raises(StoreMisconfigured, match=r"401 \(10000: Authentication error\)"):
            await kv.get("key")
        assert clock.now == began
        await kv.aclose()

    async def test_unknown_namespace_is_an_error(self, cloudflare_base: str, clock: FakeClock) -> None:
        kv = CloudflareKV(ACCOUNT, "0" * 32, TOKEN, api_base=cloudflare_base, clock=clock)
        with pytest.raises(StoreUnavailable, match="namespace not found"):
            await kv.get("key")
        await kv.aclose()

    async def test_a_time_to_live_that_is_too_short_is_refused(self, cloudflare_kv: CloudflareKV) -> None:
        with pytest.raises(StoreUnavailable, match="at least 60"):
            await cloudflare_kv.put("key", "1", 59)

    async def test_status_200_without_success_is_an_error(self, clock: FakeClock) -> None:
        kv = kv_answering(clock, lambda request: httpx.Response(200, json={"success": False, "errors": None}))
        with pytest.raises(StoreUnavailable, match="answered 200"):
            await kv.put("key", "1", 60)

    @pytest.mark.parametrize("body", [b"<html>", b"[]", b"null", b'{"errors": [1, {"code": 5}]}'])
    async def test_refusal_without_a_message_is_misconfigured(self, clock: FakeClock, body: bytes) -> None:
        kv = kv_answering(clock, lambda request: httpx.Response(403, content=body))
        with pytest.raises(StoreMisconfigured, match="answered 403"):
            await kv.get("key")


class TestRetries:
    """Temporary failures are retried: timeouts, 429 and 5xx."""

    @pytest.mark.parametrize("status", [429, 500, 502, 503])
    async def test_temporary_failure_is_retried(
        self, status: int, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        began = clock.now
        cloudflare.fail(status)
        cloudflare.fail(status)
        await cloudflare_kv.put("key", "1", 60)
        assert cloudflare.value("key") == "1"
        assert clock.now - began == 0.5 + 1

    async def test_retry_after_is_respected(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        began = clock.now
        cloudflare.fail(429, retry_after="3")
        await cloudflare_kv.put("key", "1", 60)
        assert clock.now - began == 3

    async def test_long_retry_after_fails_without_waiting(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        began = clock.now
        cloudflare.fail(429, retry_after="287")
        with pytest.raises(StoreUnavailable, match="429"):
            await cloudflare_kv.get("key")
        assert clock.now == began
        assert len(cloudflare.calls) == 1

    async def test_permanent_failure_stops_after_five_attempts(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        began = clock.now
        for _ in range(10):
            cloudflare.fail(500)
        with pytest.raises(StoreUnavailable, match="500"):
            await cloudflare_kv.get("key")
        assert clock.now - began == 0.5 + 1 + 2 + 4
        assert len(cloudflare.calls) == 5

    async def test_timeout_is_retried_and_then_unavailable(self, clock: FakeClock) -> None:
        answers: list[Exception | httpx.Response] = [httpx.ReadTimeout("slow"), httpx.Response(200, text="7")]

        def answer(request: httpx.Request) -> httpx.Response:
            found = answers.pop(0) if answers else httpx.ConnectError("down")
            if isinstance(found, Exception):
                raise found
            return found

        kv = kv_answering(clock, answer)
        assert await kv.get("key") == "7"
        with pytest.raises(StoreUnavailable, match="ConnectError"):
            await kv.get("key")

    async def test_unreadable_response_is_unavailable(self, clock: FakeClock) -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(
                200, headers={"content-encoding": "gzip"}, stream=httpx.ByteStream(b"no gzip")
            )

        with pytest.raises(StoreUnavailable, match="DecodingError"):
            await kv_answering(clock, answer).get("key")


class TestStaleReads:
    """Cloudflare may return a value that is up to a minute old."""

    async def test_process_reads_its_own_writes(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        cloudflare.lag = 60
        for number in range(1, 90):
            expected = None if number == 1 else str(number - 1)
            assert await cloudflare_kv.get("key") == expected
            await cloudflare_kv.put("key", str(number), 3600)
            clock.advance(1)

    async def test_value_written_by_another_process_is_accepted(
        self, cloudflare_kv: CloudflareKV, cloudflare_base: str, clock: FakeClock
    ) -> None:
        other = CloudflareKV(ACCOUNT, NAMESPACE, TOKEN, api_base=cloudflare_base, clock=clock)
        await cloudflare_kv.get("key")
        await cloudflare_kv.put("key", "1", 3600)
        await other.put("key", "5", 3600)
        assert await cloudflare_kv.get("key") == "5"
        await other.aclose()

    async def test_earlier_value_written_again_is_accepted(self, cloudflare_kv: CloudflareKV) -> None:
        """After a refund, the latest count equals an earlier one."""
        for value in ("1", "2", "1"):
            await cloudflare_kv.put("key", value, 60)
        assert await cloudflare_kv.get("key") == "1"

    async def test_purge_by_another_process_is_seen_within_a_minute(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        assert await cloudflare_kv.get("key") is None
        await cloudflare_kv.put("key", "20", 3600)
        cloudflare.history.clear()
        clock.advance(59)
        assert await cloudflare_kv.get("key") == "20"
        clock.advance(1)
        assert await cloudflare_kv.get("key") is None

    async def test_own_delete_is_seen_immediately(
        self, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        await cloudflare_kv.put("key", "20", 3600)
        clock.advance(60)
        cloudflare.lag = 60
        assert await cloudflare_kv.get("key") == "20"
        await cloudflare_kv.delete("key")
        assert await cloudflare_kv.get("key") is None

    async def test_remembered_writes_are_bounded(self, cloudflare_kv: CloudflareKV, clock: FakeClock) -> None:
        for number in range(200):
            await cloudflare_kv.get(f"key{number}")
            await cloudflare_kv.put("busy", str(number), 60)
            clock.advance(1)
        assert len(cloudflare_kv._latest._entries) <= 61
        assert len(cloudflare_kv._latest._entries["busy"].replaced) <= 60


class TestLimiting:
    """Stale reads, limited writes and a burst together: the worst case for one process."""

    @pytest.mark.parametrize("rule", [fixed_window(Quota.of(20, HOUR)), sliding_window(Quota.of(20, HOUR))])
    async def test_a_burst_admits_exactly_the_limit(
        self, rule: Rule, cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, clock: FakeClock
    ) -> None:
        cloudflare.writes_per_second_are_limited = True
        cloudflare.lag = 60
        limiter = AsyncLimiter(rule, name="bot", store=KVStore(cloudflare_kv, clock=clock))
        decisions = await asyncio.gather(*(limiter.hit("42") for _ in range(50)))
        assert sum(decision.allowed for decision in decisions) == 20

    def test_store_is_not_exact(self) -> None:
        assert not KVStore(CloudflareKV("a", "n", "t")).guarantees.exact


async def test_the_token_is_in_no_log_and_no_error(
    cloudflare_kv: CloudflareKV, cloudflare: CloudflareServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    cloudflare.fail(500)
    await cloudflare_kv.put("key", "1", 60)
    cloudflare.fail(403, 10000, "Authentication error")
    with pytest.raises(StoreMisconfigured) as caught:
        await cloudflare_kv.get("key")
    assert "retrying" in caplog.text
    assert TOKEN not in caplog.text + str(caught.value) + repr(cloudflare_kv)


def kv_answering(clock: FakeClock, answer: Callable[[httpx.Request], httpx.Response]) -> CloudflareKV:
    return CloudflareKV("a", "n", "t", clock=clock, transport=httpx.MockTransport(answer))
