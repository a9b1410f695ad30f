"""A stream of events and a client that leaves it."""

import asyncio

import pytest

from lumotree.serve.stream import EventStream


async def leaves():
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


async def stays():
    await asyncio.Event().wait()


def test_the_work_is_abandoned_before_its_chunks_end():
    """Sending may be slow to stop; what it waits for must end all the same."""
    abandoned = asyncio.Event()

    async def chunks():
        try:
            while True:
                yield b"data: x\n\n"
                await asyncio.sleep(0)
        finally:
            await abandoned.wait()

    async def send(message):
        await asyncio.sleep(0)

    stream = EventStream(chunks(), abandoned.set, 60.0)
    asyncio.run(asyncio.wait_for(stream({}, leaves, send), 60.0))
    assert abandoned.is_set()


@pytest.mark.parametrize("turns", range(8))
def test_leaving_stops_the_sender_wherever_it_is(turns):
    """A cancellation that meets the end of one `send` is not lost to the next chunk."""
    abandoned, sent = asyncio.Event(), []
    left = asyncio.Event()

    async def leaving():
        await left.wait()
        return {"type": "http.disconnect"}

    async def chunks():
        for number in range(1000):
            if number == 3:
                left.set()
                for _ in range(turns):
                    await asyncio.sleep(0)
            yield b"x"

    async def send(message):
        await asyncio.sleep(0)
        sent.append(message)

    asyncio.run(EventStream(chunks(), abandoned.set, 60.0)({}, leaving, send))
    assert abandoned.is_set() and len(sent) < 1000


def test_a_client_that_takes_nothing_has_left():
    abandoned = asyncio.Event()

    async def chunks():
        yield b"x"

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    asyncio.run(EventStream(chunks(), abandoned.set, 0.05)({}, stays, send))
    assert abandoned.is_set()
