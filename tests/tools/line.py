"""A line to a store: a relay on this machine with a rate for all connections together, a pause before an answer, and a count of bytes."""

import contextlib
import socket
import threading
import time

from tests.tools.objectstore import free_port

PIECE = 1 << 14


class Line:
    """`rate`: bytes a second from the store, None: as many as come; `pause`: seconds before the first byte of an answer.

    While `open` is not set, nothing comes.
    """

    def __init__(self, port, rate=None, pause=0.0):
        self.open = threading.Event()
        self.open.set()
        self.port, self.rate, self.pause = free_port(), rate, pause
        self.down = self.requests = 0  # bytes from the store; answers
        self._to, self._lock, self._free_at = port, threading.Lock(), 0.0
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.open.set()
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):  # it is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for one in (near, far):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or a piece may wait 40 ms for an ACK
                asked = threading.Event()  # something was asked since the last answer
                for pair in ((near, far, False, asked), (far, near, True, asked)):
                    threading.Thread(target=self._relay, args=pair, daemon=True).start()

    def _relay(self, source, target, down, asked):
        with contextlib.suppress(OSError):
            while content := source.recv(PIECE):
                if not down:
                    asked.set()
                elif asked.is_set():
                    asked.clear()
                    self.requests += 1
                    time.sleep(self.pause)
                if down:
                    self._take_turn(len(content))
                target.sendall(content)
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _take_turn(self, size):
        self.open.wait()
        with self._lock:
            self.down += size
            now = time.monotonic()
            self._free_at = max(self._free_at, now - 0.01) + (size / self.rate if self.rate else 0)
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)
