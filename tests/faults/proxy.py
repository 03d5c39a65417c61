"""A proxy whose connections can be broken on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Literal

Mode = Literal["forward", "lose replies", "cut halfway", "trickle"]


class FaultProxy:
    """Forwards connections to a port of this machine, from a dedicated thread.

    Attributes:
        port: The port it listens on.
        mode: How it treats data. `lose replies`: closes the connection instead of forwarding the reply, after the server has
            executed the command. `cut halfway`: forwards half of the request and closes the connection. `trickle`: forwards
            replies byte by byte, like a very slow network.
        lost: Set when a reply was lost.
    """

    def __init__(self, target: int) -> None:
        self.mode: Mode = "forward"
        self.port = 0
        self.lost = threading.Event()
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._open: set[asyncio.StreamWriter] = set()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def drop_connections(self) -> None:
        """Close all connections at once."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._listening.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen())

    async def _listen(self) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._listening.set()
        await self._over.wait()
        server.close()
        while self._open:
            self._abort_all()
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError):  # the server is down
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            self._open.add(far_writer)
            await asyncio.gather(
                self._forward(reader, far_writer, is_reply=False),
                self._forward(far_reader, writer, is_reply=True),
            )
            self._abort(far_writer)
        self._abort(writer)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if is_reply and self.mode == "lose replies":
                    self.lost.set()
                    break
                while is_reply and self.mode == "trickle" and data:
                    writer.write(data[:1])
                    data = data[1:]
                    await asyncio.sleep(0.05)
                if not is_reply and self.mode == "cut halfway":
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    break
                writer.write(data)
                await writer.drain()
        self._abort(writer)

    def _abort(self, writer: asyncio.StreamWriter) -> None:
        self._open.discard(writer)
        writer.transport.abort()

    def _abort_all(self) -> None:
        for writer in tuple(self._open):
            self._abort(writer)
