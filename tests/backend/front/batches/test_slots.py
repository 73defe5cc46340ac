"""Lines of batches leave room for clients: how many are open, and what the engine sees of it."""

from __future__ import annotations

import asyncio

import pytest

from tests.backend.front.batches.clients import create, line, wait
from tests.backend.front.fronts import Front
from tests.fake_engine import FakeEngine
from tests.waiting import wait_until
from tridecode.backend.front.batches.slots import SPACING_S, Slots, most_lines, open_requests


@pytest.mark.parametrize(
    ("slots", "clients", "wanted"),
    [(256, 0, 240), (256, 100, 140), (64, 0, 60), (16, 0, 15), (4, 0, 4), (8, 30, 1)],
)
def test_lines_leave_slots_free(slots: int, clients: int, wanted: int) -> None:
    assert most_lines(slots, clients) == wanted


def test_open_requests_are_those_of_all_engines() -> None:
    name = b"tridecode_engine_open_requests"
    page = b'# TYPE x\n%b{engine="a"} 3\n%b{engine="b"} 4\n' % (name, name)
    assert open_requests(page) == 7
    assert open_requests(b"tridecode_engine_ready 1\n") is None


def test_lines_wait_for_slots_and_get_those_that_clients_give_back() -> None:
    async def main() -> None:
        slots, order = Slots(4), list[int]()

        async def use(number: int) -> None:
            await slots.wait()
            order.append(number)

        await slots.allow(2)
        waiting = [asyncio.create_task(use(number)) for number in range(5)]
        await asyncio.sleep(0.01)
        assert order == [0, 1] and slots.open == 2
        waiting[2].cancel()  # one that gives up does not keep the others from their turn
        await slots.leave()
        await asyncio.sleep(0.01)
        assert order == [0, 1, 3]
        await slots.allow(0)
        await asyncio.sleep(0.01)
        assert order == [0, 1, 3, 4] and slots.open == 3

    asyncio.run(main())


def test_lines_begin_one_after_the_other() -> None:
    async def main() -> float:
        slots = Slots(64, workers=2)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*(slots.space() for _ in range(41)))
        return asyncio.get_running_loop().time() - began

    assert asyncio.run(main()) > 39 * SPACING_S / 2


def test_a_batch_never_fills_the_engine_and_gives_way_to_clients(front: Front, engine: FakeEngine) -> None:
    made = create(front, [line(f"line-{n}", max_tokens=100) for n in range(3000)])
    try:
        wait_until(lambda: engine.running >= 55, 60, "a busy engine")
        most = 0

        def watch() -> bool:
            nonlocal most
            most = max(most, engine.running)
            return len(seen) >= 3

        seen: list[int] = []
        for _ in range(3):
            seen.append(front.post("/v1/completions", {"prompt": "x", "max_tokens": 4}).status_code)
        wait_until(watch, 60)
        assert seen == [200] * 3
        assert most <= 61  # 60 lines of 64 slots, and one request of a client
    finally:
        front.openai.batches.cancel(made.id)
        wait(front, made.id)
