"""A proxy before the object store that breaks its answers in a stated way.

`plan(request)` is asked for every request and names a fault, or None to pass the answer on as it is. `log` holds every request.
"""

import contextlib
import dataclasses
import http.client
import http.server
import socket
import struct
import threading
import time
import urllib.parse

from tests.tools.jobs import PATIENCE

ERRORS = {
    "503": (503, "SlowDown", "Please reduce your request rate."),
    "500": (500, "InternalError", "We encountered an internal error."),
    "429": (429, "Throttling", "Too many requests."),
    "expired": (403, "ExpiredToken", "The provided token has expired."),
    "skewed": (403, "RequestTimeTooSkewed", "The difference between the request time and the server's time is too large."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
BODY_FAULTS = ["reset", "cut", "short", "flip", "stall"]


@dataclasses.dataclass
class Request:
    number: int
    method: str
    path: str
    query: dict
    headers: dict
    fault: str = None
    at: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def is_object(self):
        """Whether this asks for an object's bytes, not for a list."""
        return self.method == "GET" and self.path.count("/") > 1 and not self.query.keys() & {"prefix", "uploads", "acl"}


class FaultProxy(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port, plan=lambda request: None):
        self.upstream, self.plan, self.log, self.lock = port, plan, [], threading.Lock()
        self.over = threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def objects(self):
        """The requests for bytes of objects, so far."""
        return [request for request in self.log if request.is_object]

    def handle_error(self, *_):
        pass  # a client that goes away is what the tests are about

    def stop(self):
        self.over.set()
        self.shutdown()
        self.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _handle(self):
        server, parts = self.server, urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with server.lock:
            query = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
            request = Request(
                len(server.log), self.command, parts.path, query, {name.title(): value for name, value in self.headers.items()}
            )
            server.log.append(request)
        request.fault = server.plan(request)
        if request.fault in ERRORS:
            return self._refuse(*ERRORS[request.fault])
        connection = http.client.HTTPConnection("127.0.0.1", server.upstream, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "expect"):
                connection.putheader(name, value)
        connection.endheaders(body or None)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        self._answer(request, answer, content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    def _answer(self, request, answer, content):
        fault, length = request.fault, len(content)
        if self.command == "HEAD":
            length = int(answer.headers.get("Content-Length") or 0)
        if fault == "flip" and content:
            content = content[: length // 2] + bytes([content[length // 2] ^ 1]) + content[length // 2 + 1 :]
        if fault == "short":  # and says so: a shorter answer that looks whole
            content = content[: length * 2 // 3]
            length = len(content)
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if fault in ("reset", "cut", "stall"):
            self.wfile.write(content[: length // 2])
            self.wfile.flush()
            self.close_connection = True
            if fault == "stall":
                self.server.over.wait(PATIENCE)
            if fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            return
        self.wfile.write(content)

    def _refuse(self, status, code, message):
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def faults(store, plan, monkeypatch):
    """The store behind a proxy, for everything that looks for it in the environment."""
    proxy = FaultProxy(store.port, plan)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    try:
        yield proxy
    finally:
        proxy.stop()
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", store.endpoint)
