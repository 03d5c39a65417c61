"""Where messages go: an HTTP endpoint, a Python function, or back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from headgate import ConfigError
from headgate.testing import FakeClock
from headgate_services.telegram import ButtonPress, Message
from headgate_services.telegram.dispatch import DispatchError, HttpAgent, load_handler
from tests.apps.telegram.conftest import Start
from tests.apps.telegram.updates import button_update, text_update, topic_update
from tests.unit.kv.http_server import served

MESSAGE = Message(7, 1365, "42", "-100", "Hello", 77)


class Agent:
    """An operator's endpoint."""

    def __init__(self) -> None:
        self.app = FastAPI()
        self.app.add_api_route("/agent", self.answer, methods=["POST"])
        self.start_over()

    def start_over(self) -> None:
        self.received: list[tuple[dict[str, Any], str]] = []
        self.answers: deque[Response] = deque()

    async def answer(self, request: Request) -> Response:
        self.received.append((await request.json(), request.headers["idempotency-key"]))
        return self.answers.popleft() if self.answers else Response(status_code=202)


@pytest.fixture(scope="module")
def agent_at() -> Iterator[tuple[Agent, str]]:
    agent = Agent()
    with served(agent.app) as address:
        yield agent, f"{address}/agent"


@pytest.fixture
def agent(agent_at: tuple[Agent, str]) -> Agent:
    agent_at[0].start_over()
    return agent_at[0]


@pytest.fixture
def url(agent: Agent, agent_at: tuple[Agent, str]) -> str:
    return agent_at[1]


@pytest.fixture
async def connect(url: str, clock: FakeClock) -> AsyncIterator[Callable[..., HttpAgent]]:
    """Make handlers that send to the endpoint, or to another one."""
    async with AsyncExitStack() as stack:

        def connect(to: str = url) -> HttpAgent:
            handler = HttpAgent(to, clock=clock)
            stack.push_async_callback(handler.aclose)
            return handler

        yield connect


Connect = Callable[..., HttpAgent]


class TestHttpAgent:
    async def test_a_message_arrives_as_json(self, agent: Agent, connect: Connect) -> None:
        assert await connect()(MESSAGE) is None
        expected = {
            "kind": "message",
            "update_id": 7,
            "message_id": 1365,
            "user_id": "42",
            "chat_id": "-100",
            "text": "Hello",
            "message_thread_id": 77,
            "files": [],
        }
        assert agent.received == [(expected, "telegram-update-7")]

    async def test_a_press_arrives_as_json(self, agent: Agent, connect: Connect) -> None:
        await connect()(ButtonPress(8, "q", "42", "approve:7"))
        ((body, key),) = agent.received
        assert (body["kind"], body["data"], body["query_id"], key) == (
            "button",
            "approve:7",
            "q",
            "telegram-update-8",
        )

    @pytest.mark.parametrize(
        ("answer", "reply"),
        [
            (JSONResponse({"reply": "Hi"}), "Hi"),
            (JSONResponse({"reply": "Hi"}, 201), "Hi"),
            (JSONResponse({"reply": ""}), None),
            (JSONResponse({"reply": 5}), None),
            (JSONResponse({}), None),
            (JSONResponse(["reply"]), None),
            (Response("reply"), None),
            (Response(status_code=204), None),
        ],
    )
    async def test_the_answer_may_carry_a_reply(
        self, answer: Response, reply: str | None, agent: Agent, connect: Connect
    ) -> None:
        agent.answers.append(answer)
        assert await connect()(MESSAGE) == reply

    async def test_a_server_error_is_tried_again_after_growing_pauses(
        self, agent: Agent, connect: Connect, clock: FakeClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        agent.answers.extend(
            [Response(status_code=500), Response(status_code=503), JSONResponse({"reply": "Hi"})]
        )
        began = clock.now
        assert await connect()(MESSAGE) == "Hi"
        assert clock.now - began == 0.5 + 1
        assert [key for _, key in agent.received] == ["telegram-update-7"] * 3
        assert "status 503; trying again in 1 s" in caplog.text

    @pytest.mark.parametrize("status", [301, 400, 401, 404, 429])
    async def test_a_refusal_is_not_tried_again(self, status: int, agent: Agent, connect: Connect) -> None:
        agent.answers.append(Response(status_code=status))
        with pytest.raises(DispatchError, match=f"refused with status {status}"):
            await connect()(MESSAGE)
        assert len(agent.received) == 1

    async def test_nobody_there_is_tried_again_and_given_up(self, connect: Connect, clock: FakeClock) -> None:
        began = clock.now
        with pytest.raises(DispatchError, match="ConnectError"):
            await connect("http://127.0.0.1:1/agent")(MESSAGE)
        assert clock.now - began == 3.5

    async def test_the_bot_dispatches_to_it(self, agent: Agent, url: str, start: Start) -> None:
        service = await start(handler="configured", AGENT_URL=url, RATE_LIMIT_MAX="1")
        agent.answers.append(JSONResponse({"reply": "**Hi**"}))
        await service.send(topic_update(77), topic_update(77))
        assert [body["text"] for body, _ in agent.received] == ["Hello"]
        assert service.bot.sent()[0]["text"] == "<b>Hi</b>"


class TestEcho:
    async def test_the_bot_works_the_moment_it_has_a_token(self, start: Start) -> None:
        service = await start(handler="configured")
        await service.send(text_update(text="Hello <you>"), button_update(data="approve:7"))
        assert service.bot.calls == [
            ("sendMessage", {"chat_id": "42", "text": "Hello &lt;you&gt;", "parse_mode": "HTML"}),
            ("answerCallbackQuery", {"callback_query_id": "4382bfdwdsb323b2d9", "text": "approve:7"}),
        ]


class TestFunction:
    """AGENT_HANDLER names a Python function."""

    @pytest.fixture(autouse=True)
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", [*__import__("sys").path])
        (tmp_path / "my_telegram_agent.py").write_text(
            "import threading\n"
            "async def asynchronous(event):\n    return event.text.upper()\n"
            "def plain(event):\n    return threading.current_thread().name\n"
            "class Agent:\n    async def __call__(self, event):\n        return 'an object'\n"
            "agent = Agent()\n"
            "def failing(event):\n    raise ValueError('no')\n"
        )

    async def test_a_coroutine_function(self) -> None:
        assert await load_handler("my_telegram_agent:asynchronous")(MESSAGE) == "HELLO"

    async def test_a_plain_function_gets_a_thread(self) -> None:
        name = await load_handler("my_telegram_agent:plain")(MESSAGE)
        assert name not in (None, threading.current_thread().name)

    async def test_an_object_that_can_be_called(self) -> None:
        assert await load_handler("my_telegram_agent:agent")(MESSAGE) == "an object"

    @pytest.mark.parametrize(
        "spec", ["", "my_telegram_agent", "my_telegram_agent:", "my_telegram_agent:Missing"]
    )
    def test_what_names_no_function_is_refused(self, spec: str) -> None:
        with pytest.raises(ConfigError, match="AGENT_HANDLER"):
            load_handler(spec)
