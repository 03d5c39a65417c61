"""A way to a server that can be broken on purpose, and mends itself when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Literal

Mode = Literal["forward", "lose replies", "cut halfway"]


class FaultProxy:
    """Forwards connections to a port of this machine, from a thread of its own.

    Attributes:
        port: Where it listens.
        mode: What it does with what it gets. To lose replies is to close a connection instead of handing over what the
            server answered, which is after the server has done what it was asked. To cut halfway is to hand over half of
            what a client has sent.
    """

    def __init__(self, target: int) -> None:
        self.mode: Mode = "forward"
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._open: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def drop_connections(self) -> None:
        """Close all connections, whatever is under way on them."""
        self._loop.call_soon_threadsafe(self._abort_all)

    def __enter__(self) -> FaultProxy:
        listening = threading.Event()
        self._loop.call_soon(lambda: self._loop.create_task(self._listen(listening)))
        self._thread.start()
        listening.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._abort_all)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _listen(self, listening: threading.Event) -> None:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        listening.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:  # the server is down, and so is the way to it
            self._abort(writer)
            return
        self._open.add(far_writer)
        await asyncio.gather(
            self._forward(reader, far_writer, is_reply=False),
            self._forward(far_reader, writer, is_reply=True),
        )
        self._abort(writer)
        self._abort(far_writer)

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if is_reply and self.mode == "lose replies":
                    break
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
