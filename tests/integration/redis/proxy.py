"""A proxy that can drop the replies of a server."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Forwards connections to a local port; can drop the replies of the server."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._losing = threading.Event()
        self._lost = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def lose_replies(self) -> None:
        """Forward requests, but close the connection instead of forwarding a reply."""
        self._lost.clear()
        self._losing.set()

    def forward_again(self) -> None:
        self._losing.clear()

    def await_loss(self) -> None:
        """Return when a reply has been dropped, so that the server has executed the request."""
        assert self._lost.wait(10), "the server has answered nothing"

    def close(self) -> None:
        for end in (self._listener, *self._open):
            # Closing alone does not wake threads that wait on the socket.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, server]
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if replies and self._losing.is_set():
                    self._lost.set()
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
