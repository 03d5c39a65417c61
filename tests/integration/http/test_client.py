"""Clients that keep to limits, against peers that answer from a script, on a clock that no test waits for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from typing import Any

import httpx
import pytest
import requests
from requests.adapters import HTTPAdapter

from headgate import Limiter, RateLimited
from headgate._steps import run
from headgate.clock import SteadyClock
from headgate.http.client import (
    AsyncRateLimitTransport,
    OutboundOptions,
    RateLimitAdapter,
    RateLimitTransport,
)
from headgate.testing import FakeClock

URL = "http://peer/"
REFUSED = (429, {"retry-after": "10"})
OK = (200, {})


class Peer:
    """Answers from a script, repeats the last entry, and records the host and second of each request."""

    def __init__(self, clock: FakeClock, *script: tuple[int, dict[str, str]]) -> None:
        self._clock, self._script, self._start = clock, list(script or [OK]), clock.now
        self.seconds: list[float] = []
        self.hosts: list[str] = []

    def answer(self, host: str) -> tuple[int, dict[str, str]]:
        self.seconds.append(self._clock.now - self._start)
        self.hosts.append(host)
        return self._script.pop(0) if len(self._script) > 1 else self._script[0]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        status, headers = self.answer(request.url.host)
        return httpx.Response(status, headers=headers, text="answer")


Ask = Callable[..., Any]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=["httpx", "httpx async", "requests"])
def client(request: pytest.FixtureRequest, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a factory: given a peer and options, it returns a function that sends a request and returns status and text."""

    def httpx_client(peer: Peer, limit: Any = None, **options: Any) -> Ask:
        transport = RateLimitTransport(limit, httpx.MockTransport(peer), clock=clock, jitter=0, **options)

        async def send(method: str = "GET", url: str = URL, **sent: Any) -> tuple[int, str]:
            with httpx.Client(transport=transport) as one:
                response = one.request(method, url, **sent)  # noqa: ASYNC212  # it is what is tested
            return response.status_code, response.text

        return send

    def async_client(peer: Peer, limit: Any = None, **options: Any) -> Ask:
        transport = AsyncRateLimitTransport(
            limit, httpx.MockTransport(peer), clock=clock, jitter=0, **options
        )

        async def send(method: str = "GET", url: str = URL, **sent: Any) -> tuple[int, str]:
            async with httpx.AsyncClient(transport=transport) as one:
                response = await one.request(method, url, **sent)
            return response.status_code, response.text

        return send

    def requests_client(peer: Peer, limit: Any = None, **options: Any) -> Ask:
        def answer(
            adapter: Any, prepared: requests.PreparedRequest, *args: Any, **kwargs: Any
        ) -> requests.Response:
            response = requests.Response()
            response.status_code, headers = peer.answer(str(prepared.url).split("/")[2])
            response.headers.update(headers)
            response._content_consumed = True
            response._content, response.url, response.request = b"answer", str(prepared.url), prepared
            return response

        monkeypatch.setattr(HTTPAdapter, "send", answer)
        adapter = RateLimitAdapter(limit, clock=clock, jitter=0, **options)

        async def send(method: str = "GET", url: str = URL, content: Any = None) -> tuple[int, str]:
            with requests.Session() as session:
                session.mount("http://", adapter)
                response = session.request(method, url, data=content)
            return response.status_code, response.text

        return send

    return {"httpx": httpx_client, "httpx async": async_client, "requests": requests_client}[request.param]


async def test_a_request_waits_for_the_callers_own_limit(client: Ask, clock: FakeClock) -> None:
    peer = Peer(clock)
    send = client(peer, "2/minute")
    for url in (URL, URL, "http://other/", URL):
        assert await send(url=url) == (200, "answer")
    assert peer.hosts == ["peer", "peer", "other", "peer"]
    assert peer.seconds == [0, 0, 0, 61]


async def test_refused_request_is_retried_after_retry_after(client: Ask, clock: FakeClock) -> None:
    peer = Peer(clock, REFUSED, (503, {"retry-after": "20"}), OK)
    assert await client(peer)() == (200, "answer")
    assert peer.seconds == [0, 10, 30]


async def test_retries_are_bounded(client: Ask, clock: FakeClock) -> None:
    peer = Peer(clock, REFUSED)
    assert await client(peer, retries=1)() == (429, "answer")
    assert peer.seconds == [0, 10]
    assert await client(Peer(clock, REFUSED), retries=0)() == (429, "answer")


async def test_refusal_without_retry_after_uses_exponential_backoff(client: Ask, clock: FakeClock) -> None:
    peer = Peer(clock, (429, {}))
    assert (await client(peer)())[0] == 429
    assert peer.seconds == [0, 0.5, 1.5]


async def test_only_idempotent_methods_are_retried(client: Ask, clock: FakeClock) -> None:
    for method, times in (("POST", 1), ("PATCH", 1), ("PUT", 2), ("delete", 2)):
        peer = Peer(clock, REFUSED, OK)
        await client(peer)(method)
        assert len(peer.seconds) == times
    peer = Peer(clock, REFUSED, OK)
    await client(peer, methods=["post"])("POST", content=b"body")
    assert len(peer.seconds) == 2


async def test_request_with_consumed_body_is_not_retried(client: Ask, clock: FakeClock) -> None:
    async def pieces() -> Any:
        yield b"once"

    peer = Peer(clock, REFUSED, OK)
    send = client(peer)
    try:
        answer = await send("PUT", content=iter([b"once"]))
    except RuntimeError:  # an async client takes async bodies
        answer = await send("PUT", content=pieces())
    assert answer == (429, "answer")


async def test_no_request_is_sent_while_the_peers_limit_is_used_up(client: Ask, clock: FakeClock) -> None:
    peer = Peer(clock, (200, {"ratelimit": '"a";r=0;t=30'}), OK)
    send = client(peer)
    for url in (URL, "http://other/", URL):
        await send(url=url)
    assert (peer.hosts, peer.seconds) == (["peer", "other", "peer"], [0, 0, 30])


async def test_wait_longer_than_max_wait_is_not_started(client: Ask, clock: FakeClock) -> None:
    peer = Peer(clock, (429, {"retry-after": "91"}), OK)
    send = client(peer)
    assert await send() == (429, "answer")
    with pytest.raises(RateLimited) as refused:
        await send()
    assert refused.value.decision.retry_after == 91
    clock.advance(91)
    assert await send() == (200, "answer")
    assert peer.seconds == [0, 91]
    send = client(Peer(clock), "1/hour")
    await send()
    with pytest.raises(RateLimited):
        await send()


async def test_refusal_is_returned_if_the_callers_limit_needs_too_long_a_wait(
    client: Ask, clock: FakeClock
) -> None:
    peer = Peer(clock, (429, {"retry-after": "1"}), OK)
    send = client(peer, "1/minute", max_wait=30)
    assert await send() == (429, "answer")
    assert len(peer.seconds) == 1


async def test_caller_can_choose_the_key(client: Ask, clock: FakeClock) -> None:
    def token(request: Any) -> str:
        return str(request.url).rsplit("=", 1)[1]

    peer = Peer(clock)
    send = client(peer, "1/minute", key=token)
    for name in "aba":
        await send(url=f"http://{name}/?token={name}")
    assert peer.seconds == [0, 0, 61]


def test_request_waiting_for_limit_and_pause_is_counted_when_sent() -> None:
    class Clock(FakeClock):
        def sleep(self, seconds: float) -> None:
            if self.now == start:
                with pytest.raises(StopIteration):
                    earlier.send(httpx.Response(429, headers={"retry-after": "200"}))
            super().sleep(seconds)

    def exchange(send: Callable[[], Any]) -> Any:
        return options.exchange("peer", "POST", False, send, clock.sleep, lambda answer: None)

    clock = Clock()
    start = clock.now
    peer = Peer(clock)
    limiter = Limiter("1/minute", clock=clock)
    options = OutboundOptions(Limiter, limiter, jitter=0, max_wait=300)
    earlier = exchange(lambda: None)
    next(earlier)
    earlier.send(None)  # now it has been sent
    run(exchange(lambda: peer(httpx.Request("POST", URL))))
    assert peer.seconds == [200]
    assert not limiter.check("peer")


def test_dates_are_compared_with_the_wall_clock() -> None:
    steady = SteadyClock()
    steady.epoch_us -= 3_600_000_000  # the machine was suspended for an hour
    refusal = httpx.Response(429, headers={"retry-after": formatdate(time.time() + 60, usegmt=True)})
    options = OutboundOptions(Limiter, None, clock=steady)
    run(options.exchange("peer", "POST", False, lambda: refusal, steady.sleep, lambda answer: None))
    assert 0 < options.pause_us("peer") <= 60_000_000


def test_pauses_have_random_jitter(clock: FakeClock) -> None:
    peer = Peer(clock, REFUSED, OK)
    transport = RateLimitTransport(None, httpx.MockTransport(peer), clock=clock, jitter=1.0)
    with httpx.Client(transport=transport) as one:
        one.get(URL)
    assert 10 < peer.seconds[1] < 20


def test_jitter_does_not_exceed_max_wait(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.random", lambda: 0.9)
    peer = Peer(clock, (429, {"retry-after": "80"}), OK)
    transport = RateLimitTransport(None, httpx.MockTransport(peer), clock=clock, jitter=1.0)
    with httpx.Client(transport=transport) as one:
        assert one.get(URL).status_code == 200
    assert peer.seconds == [0, 90]


def test_expired_pauses_are_removed(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.http.client.options.MOST_PAUSES", 2)
    transport = RateLimitTransport(None, httpx.MockTransport(Peer(clock, REFUSED)), clock=clock, retries=0)
    with httpx.Client(transport=transport) as one:
        for number in range(5):
            one.get(f"http://{number}/")
            clock.advance(11)
    assert len(transport._options._pauses) <= 2


def test_no_pause_is_lost_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headgate.http.client.options.MOST_PAUSES", 10)
    options = OutboundOptions(Limiter, None)
    refusal = httpx.Response(429, headers={"retry-after": "3600"})
    interval = sys.getswitchinterval()

    def send(host: str) -> None:
        run(options.exchange(host, "POST", False, lambda: refusal, options.clock.sleep, lambda answer: None))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(send, map(str, range(4000))))
    finally:
        sys.setswitchinterval(interval)
    assert all(options.pause_us(str(host)) for host in range(4000))


def test_unknown_name_raises_attribute_error() -> None:
    import headgate.http.client

    with pytest.raises(AttributeError, match="Transports"):
        headgate.http.client.Transports  # noqa: B018
