"""Being told to stop."""

from __future__ import annotations

import asyncio
import signal


class StopSignals:
    """Ctrl-C, `kill` and the end of the terminal; a second one ends the process at once.

    Attributes:
        told: Set when one has come.
    """

    def __init__(self) -> None:
        self.told = asyncio.Event()
        self._numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
            self._numbers.append(signal.SIGHUP)
        self.listen()

    def listen(self) -> None:
        """Be the one who is told; again, if somebody else has been meanwhile."""
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.add_signal_handler(number, self._stop)

    def _stop(self) -> None:
        self.told.set()
        loop = asyncio.get_running_loop()
        for number in self._numbers:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
