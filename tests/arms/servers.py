"""A small server on the loopback that answers from a script and can misbehave."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """`script` is the stream's lines; `status`, `info` and `stall` set other faults."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.status, self.info, self.stall = [], 200, b'{"model_path": "m"}', None
        self.info_status = 200
        self.pages = {}  # path -> (status, bytes), or a list of them to answer one by one
        self.bodies, self.keys = [], []
        self.done = threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        status, text = self.server.info_status, self.server.info
        page = self.server.pages.get(self.path)
        if page is not None:
            status, text = page if isinstance(page, tuple) else page.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self):
        size = int(self.headers["content-length"])
        self.server.bodies.append((self.path, json.loads(self.rfile.read(size))))
        self.server.keys.append(self.headers["authorization"])
        self.send_response(self.server.status)
        if self.server.stall == "promise":  # announces more than it sends
            self.send_header("content-length", "100000")
        self.end_headers()
        for line in self.server.script:
            self.wfile.write(line + b"\n\n")
            self.wfile.flush()
        if self.server.stall == "wait":
            self.server.done.wait(60)


def closed_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
