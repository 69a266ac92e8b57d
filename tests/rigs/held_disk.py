"""A disk that ends no read or write before the test lets it."""

import errno
import os
import threading

LONG_S = 0.3  # all that does not wait is done by then


class Disk:
    """What is asked of the disk from now on: calls of one kind end only when the test lets them, and may fail."""

    def __init__(self, monkeypatch, call, fails=()):
        self.begun, self.ended, self._fails = 0, 0, fails
        self._let = threading.Event()
        self._real, self._lock = getattr(os, call), threading.Lock()
        monkeypatch.setattr(os, call, self._call)

    def _call(self, *given):
        with self._lock:
            number = self.begun
            self.begun += 1
        if number in self._fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        assert self._let.wait(30)
        try:
            return self._real(*given)
        finally:
            with self._lock:
                self.ended += 1

    def lets_go(self, after=0.0):
        """Let all calls end, after some seconds."""
        timer = threading.Timer(after, self._let.set)
        timer.daemon = True
        timer.start()
        return timer

    @property
    def under_way(self):
        return self.begun - self.ended - sum(number < self.begun for number in self._fails)
