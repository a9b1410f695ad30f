"""What `lumotree record` adds to each chunk of a stream: median and p99, direct and through it.

An upstream in a process of its own sends stamped chunks; this process reads them, first from the
upstream, then through a proxy in a third process, in turns.

    python scripts/proxy_delay.py [--chunks 500] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PAUSE_S = 0.004
BODY = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(BODY)
) + BODY
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def upstream(port: int, chunks: int) -> None:
    """Answers every request with stamped chunks."""
    server = socket.create_server(("127.0.0.1", port))
    while True:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            connection.recv(1 << 16)
            connection.sendall(HEAD)
            for _ in range(chunks):
                time.sleep(PAUSE_S)
                text = b"data: %020d\n\n" % time.perf_counter_ns()
                connection.sendall(b"%x\r\n" % len(text) + text + b"\r\n")
            connection.sendall(END)
            connection.recv(1)


def delays_ms(port: int) -> list[float]:
    """Milliseconds from each chunk's stamp to its arrival."""
    found, tail = [], b""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(REQUEST)
        while not tail.endswith(END):
            part = sock.recv(1 << 16)
            now = time.perf_counter_ns()
            tail = (tail + part)[-len(END) :]
            found += [(now - int(word[:20])) / 1e6 for word in part.split(b"data: ")[1:]]
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ports = free_port(), free_port()
    process = multiprocessing.Process(target=upstream, args=(ports[0], options.chunks), daemon=True)
    process.start()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        where = ["--upstream", f"http://127.0.0.1:{ports[0]}", "--out", str(out)]
        command = [sys.executable, "-m", "replay.cli", "record", *where, "--port", str(ports[1])]
        proxy = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            if "recording" not in proxy.stderr.readline():
                raise SystemExit(proxy.stderr.read())
            rounds = [[delays_ms(port) for port in ports] for _ in range(options.rounds)]
        finally:
            proxy.terminate()
            proxy.wait()
            process.terminate()
    for name, side in (("direct", 0), ("through the proxy", 1)):
        pooled = sorted(d for each in rounds for d in each[side])
        p99 = pooled[int(0.99 * len(pooled))]
        print(f"{name}: median {statistics.median(pooled):.3f} ms, p99 {p99:.3f} ms")
    added = [statistics.median(b) - statistics.median(a) for a, b in rounds]
    print(f"median added per chunk: {statistics.median(added):.3f} ms (of {len(added)} rounds)")


if __name__ == "__main__":
    main()
