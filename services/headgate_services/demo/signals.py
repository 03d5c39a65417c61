"""Signals to stop."""

from __future__ import annotations

import asyncio
import signal


class StopSignals:
    """Ctrl-C, `kill` and the end of the terminal; a second one ends the process at once.

    Attributes:
        received: Set when one has come.
    """

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self._numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            self._numbers.append(signal.SIGHUP)
        self.listen()

    def listen(self) -> None:
        """Handle the signals; again, if another handler was set meanwhile."""
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self.received.set()
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
