"""Local replacements of the internet services: a mail server, and Telegram's Bot API.

They accept everything and only count.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

_LONGEST_LINE = 2**20


class MailSink:
    """An SMTP server that takes every e-mail and throws it away.

    Attributes:
        taken: How many e-mails it has taken.
    """

    def __init__(self) -> None:
        self.taken = 0
        self._server: asyncio.Server | None = None
        self._conversations: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self) -> None:
        """Listen on any free port."""
        self._server = await asyncio.start_server(self._converse, "127.0.0.1", 0, limit=_LONGEST_LINE)

    async def stop(self) -> None:
        """End every conversation. Safe to call at any time."""
        if self._server is None:
            return
        self._server.close()
        for conversation in self._conversations:
            conversation.cancel()
        if self._conversations:
            await asyncio.wait(self._conversations)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._conversations.add(task)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return  # they hung up, or what they say is not SMTP
        finally:
            writer.close()
            self._conversations.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await _say(writer, "220 localhost ready")
        while True:
            line = await reader.readuntil(b"\n")
            match line[:4].upper().strip():
                case b"EHLO":
                    await _say(writer, "250-localhost\r\n250-8BITMIME\r\n250 SMTPUTF8")
                case b"DATA":
                    await _say(writer, "354 go ahead")
                    await reader.readuntil(b"\r\n.\r\n")
                    self.taken += 1
                    await _say(writer, "250 taken")
                case b"QUIT":
                    await _say(writer, "221 bye")
                    return
                case b"HELO" | b"MAIL" | b"RCPT" | b"RSET" | b"NOOP":
                    await _say(writer, "250 ok")
                case _:
                    await _say(writer, "502 not here")


async def _say(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{text}\r\n".encode())
    await writer.drain()


class BotApiStandIn:
    """An ASGI application that answers every method of the Bot API with success.

    Attributes:
        refusals: How many of the messages were about the limit.
    """

    def __init__(self, refusal: str) -> None:
        self.refusals = 0
        self._refusal = refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            arguments = json.loads(await _body(receive))
            if arguments.get("text") == self._refusal:
                self.refusals += 1
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"ok":true,"result":{"message_id":1}}'})


async def _live(receive: Any, send: Any) -> None:
    while True:
        event = (await receive())["type"]
        await send({"type": f"{event}.complete"})
        if event == "lifespan.shutdown":
            return


async def _body(receive: Any) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body
