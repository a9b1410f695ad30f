"""A storm on `lumotree serve`: clients that cancel, stall, lie and come in crowds.

Starts a server, sends a first wave to warm it up, then the storm, and checks that memory is back
where it was, no slot is stuck, every request ended or was told why, and the counters add up.
Then sends SIGTERM in the middle of a last wave and checks that what was taken ends.

    python scripts/serve_storm.py --model embedded --requests 2000 --clients 16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

ACTIVE, QUEUE, CONTEXT, BODY_KIB = 4, 10, 512, 64
SETTINGS = [
    *("--active", str(ACTIVE), "--queue", str(QUEUE), "--max-context", str(CONTEXT)),
    *("--max-body-mib", str(BODY_KIB / 1024), "--idle-timeout", "5", "--prefix-mib", "8"),
    *("--drain-timeout", "120"),
]
KINDS = {
    "whole": 30,
    "stream": 20,
    "cancel": 20,
    "leave": 5,
    "slow": 5,
    "oversize": 5,
    "not utf-8": 5,
    "not json": 5,
    "refused": 5,
}
MEMORY_TOLERANCE = 0.05


class Tally:
    """What the clients saw. accepted, done and cancelled count choices."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.accepted = self.done = self.unsure = self.tokens = self.cut = 0
        self.faults: list[str] = []

    def expect(self, kind: str, status: int, *wanted: int) -> bool:
        self.statuses[status] += 1
        if status not in wanted:
            self.faults.append(f"{kind}: status {status}")
        return status == 200


class Client:
    """One client; what it does next is drawn from its own generator."""

    def __init__(self, url: str, seed: int, tally: Tally) -> None:
        self.random, self.tally = random.Random(seed), tally
        self.http = httpx.AsyncClient(base_url=url, timeout=120, trust_env=False)

    def body(self, **more: Any) -> dict[str, Any]:
        draw = self.random
        shared = [5 + i % 90 for i in range(draw.choice([10, 10, 40, 300]))]
        prompt = shared + [draw.randrange(4000) for _ in range(draw.randrange(1, 20))]
        fields = {"prompt": prompt, "max_tokens": draw.randrange(1, 12), "ignore_eos": True}
        return fields | {"n": draw.choice([1, 1, 1, 2])} | more

    async def one(self) -> None:
        kind = self.random.choices(list(KINDS), list(KINDS.values()))[0]
        self.tally.kinds[kind] += 1
        await getattr(self, f"do_{kind.replace(' ', '_').replace('-', '_')}")()

    async def refused(self, status: int) -> bool:
        """True after a pause, when the queue was full and the request is to be sent again."""
        if status == 429:
            self.tally.statuses[429] += 1
            await asyncio.sleep(self.random.uniform(0.05, 0.3))
        return status == 429

    async def post(self, body: Any) -> httpx.Response:
        while True:
            answer = await self.http.post("/v1/completions", json=body)
            if not await self.refused(answer.status_code):
                return answer

    async def do_whole(self) -> None:
        body = self.body()
        answer = await self.post(body)
        if self.tally.expect("whole", answer.status_code, 200):
            self.tally.accepted += body["n"]
            self.tally.done += body["n"]
            self.tally.tokens += answer.json()["usage"]["completion_tokens"]

    async def read(self, kind: str, body: dict[str, Any], pause_s: float, most: int | None) -> None:
        """Streams an answer; leaves after `most` events, or reads to its end."""
        while not await self.read_once(kind, body, pause_s, most):
            pass

    async def read_once(
        self, kind: str, body: dict[str, Any], pause_s: float, most: int | None
    ) -> bool:
        async with self.http.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as answer:
            if await self.refused(answer.status_code):
                return False
            if not self.tally.expect(kind, answer.status_code, 200):
                return True
            self.tally.accepted += body["n"]
            last, tokens = "", 0
            async for line in answer.aiter_lines():
                if not line:
                    continue
                last = line
                if '"usage"' in line:
                    tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                if pause_s:
                    await asyncio.sleep(pause_s)
                if most is not None:
                    most -= 1
                    if most <= 0:
                        self.tally.cut += body["n"]
                        return True
            if last != "data: [DONE]":
                self.tally.faults.append(f"{kind}: a stream ended with {last[:60]!r}")
            elif tokens:
                self.tally.done += body["n"]
                self.tally.tokens += tokens
        return True

    async def do_stream(self) -> None:
        await self.read("stream", self.body(), 0.0, None)

    async def do_cancel(self) -> None:
        await self.read("cancel", self.body(max_tokens=30), 0.0, self.random.randrange(1, 5))

    async def do_slow(self) -> None:
        await self.read("slow", self.body(), 0.05, None)

    async def do_leave(self) -> None:
        """Leaves while it waits for a whole answer; whether it was taken is not known."""
        body = self.body(max_tokens=30, n=1)
        try:
            await asyncio.wait_for(self.post(body), self.random.uniform(0.001, 0.1))
        except TimeoutError:
            pass
        self.tally.unsure += 1

    async def do_oversize(self) -> None:
        content = b'{"prompt": "' + b"x" * (BODY_KIB << self.random.choice([10, 11])) + b'"}'
        await self.raw("oversize", content, 413)

    async def do_not_utf_8(self) -> None:
        await self.raw("not utf-8", b'{"prompt": "\xff\xfe", "max_tokens": 1}', 400)

    async def do_not_json(self) -> None:
        await self.raw("not json", self.random.choice([b"{", b"", b"[1", b"\x00"]), 400)

    async def do_refused(self) -> None:
        bad = [{"prompt": [5000]}, {"prompt": [1] * 600}, {"max_tokens": 0}, {"top_p": 2}, {"x": 1}]
        answer = await self.post(self.body() | self.random.choice(bad))
        self.tally.expect("refused", answer.status_code, 400)

    async def raw(self, kind: str, content: bytes, status: int) -> None:
        headers = {"content-type": "application/json"}
        answer = await self.http.post("/v1/completions", content=content, headers=headers)
        self.tally.expect(kind, answer.status_code, status)


async def wave(url: str, requests: int, clients: int, seed: int) -> Tally:
    """`requests` of all kinds from `clients` at once."""
    tally, left = Tally(), [requests]

    async def work(number: int) -> None:
        client = Client(url, seed * 1000 + number, tally)
        async with client.http:
            while left[0] > 0:
                left[0] -= 1
                try:
                    await client.one()
                except httpx.HTTPError as error:
                    tally.faults.append(f"{type(error).__name__}: {error}")

    await asyncio.gather(*(work(number) for number in range(clients)))
    return tally


class Server:
    """`lumotree serve` in a process of its own."""

    def __init__(self, model: str, arm: str) -> None:
        words = [sys.executable, "-m", "replay.cli", "serve", "--arm", arm, "--model", model]
        self.process = subprocess.Popen(
            [*words, "--port", "0", *SETTINGS], stderr=subprocess.PIPE, text=True
        )
        for line in self.process.stderr:
            found = re.search(r"on (http://\S+)/v1", line)
            if found:
                self.url = found[1]
                return
        raise SystemExit("the server did not start")

    def rss_mib(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def samples(self) -> dict[str, float]:
        """Counters by name, summed over labels."""
        sums: Counter[str] = Counter()
        for line in httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines():
            found = re.match(r"lumotree:(\w+)(?:\{.*\})? (\S+)$", line)
            if found:
                sums[found[1]] += float(found[2])
        return dict(sums)

    def wait_idle(self, seconds: float = 30.0) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            health = httpx.get(f"{self.url}/health", trust_env=False).json()
            if health["active"] == health["waiting"] == 0:
                return True
            time.sleep(0.05)
        return False


def storm(server: Server, warmup: int, requests: int, clients: int) -> list[str]:
    """The storm between two looks at memory and counters; returns what was wrong."""
    asyncio.run(wave(server.url, warmup, clients, seed=1))
    faults = [] if server.wait_idle() else ["a slot was stuck after the first wave"]
    before, memory = server.samples(), server.rss_mib()
    tally = asyncio.run(wave(server.url, requests, clients, seed=2))
    if not server.wait_idle():
        faults.append("a slot is stuck after the storm")
    after, now = server.samples(), server.rss_mib()
    change = {name: after[name] - before.get(name, 0) for name in after}
    ended = change["request_success_total"] + change.get("request_failure_total", 0)
    print(f"kinds: {dict(tally.kinds)}")
    print(f"statuses: {dict(sorted(tally.statuses.items()))}")
    print(
        f"choices: {tally.accepted} accepted, {tally.done} read to the end, {tally.cut} left in "
        f"the middle, up to {tally.unsure} more left before an answer; server: "
        f"{change['request_success_total']:.0f} served, "
        f"{change.get('request_failure_total', 0):.0f} ended early"
    )
    print(f"tokens: {change['generation_tokens_total']:.0f} generated, {tally.tokens} read whole")
    print(f"memory: {memory:.1f} MiB before, {now:.1f} MiB after ({now / memory - 1:+.1%})")
    faults += tally.faults
    if not tally.accepted <= ended <= tally.accepted + tally.unsure:
        faults.append(f"{tally.accepted} choices were accepted, {ended:.0f} ended")
    if not tally.done <= change["request_success_total"]:
        faults.append("more requests were read to the end than served")
    if change["generation_tokens_total"] < tally.tokens:
        faults.append("fewer tokens were counted than read")
    if change.get("spec_decode_num_accepted_tokens_total", 0) > change.get(
        "spec_decode_num_draft_tokens_total", 0
    ):
        faults.append("more drafts were accepted than verified")
    if now > memory * (1 + MEMORY_TOLERANCE):
        faults.append(f"memory rose by {now / memory - 1:.1%}")
    return faults


async def terminated(server: Server, clients: int) -> list[str]:
    """SIGTERM while `clients` stream: what was taken ends, what comes later is told no."""
    tally = Tally()
    crowd = [Client(server.url, 9000 + number, tally) for number in range(clients)]
    outcomes: Counter[str] = Counter()

    async def stream(client: Client) -> None:
        async with client.http:
            before = tally.done
            try:
                await client.read("last", client.body(max_tokens=60, n=1), 0.0, None)
                outcomes["ended" if tally.done > before else "refused"] += 1
            except httpx.ConnectError:
                outcomes["came too late"] += 1
            except httpx.HTTPError as error:
                outcomes["cut"] += 1
                tally.faults.append(f"cut by the stop: {type(error).__name__}")

    tasks = [asyncio.ensure_future(stream(client)) for client in crowd]
    await asyncio.sleep(0.5)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    print(f"after SIGTERM: {dict(outcomes)}, statuses {dict(tally.statuses)}")
    return [fault for fault in tally.faults if "status 503" not in fault]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--arm", default="lumotree")
    parser.add_argument("--warmup", type=int, default=400)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=16)
    options = parser.parse_args()
    server = Server(options.model, options.arm)
    try:
        began = time.monotonic()
        faults = storm(server, options.warmup, options.requests, options.clients)
        print(f"{options.requests} requests in {time.monotonic() - began:.0f} s")
        faults += asyncio.run(terminated(server, options.clients))
        code = server.process.wait(150)
        if code:
            faults.append(f"the server ended with exit code {code}")
    finally:
        server.process.kill()
        said = server.process.stderr.read()
        server.process.wait()
    if "Traceback" in said:
        faults.append(f"the server said: {said[-2000:]}")
    for fault in dict.fromkeys(faults):
        print(f"FAULT: {fault} ({faults.count(fault)} times)")
    print("failed" if faults else "passed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
