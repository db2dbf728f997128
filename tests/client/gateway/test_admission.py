"""Admission: slots and the queue for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.gateway.admission import Admission
from swarm.errors import RequestError


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_requests_are_admitted_in_order() -> None:
    async def main() -> None:
        admission, order = Admission(limit=2, max_waiting=9), list[int]()

        async def ask(number: int, count: int) -> None:
            async with admission.slots(count):
                order.append(number)
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as group:
            for number, count in enumerate((1, 2, 1, 1)):
                group.create_task(ask(number, count))
                await asyncio.sleep(0)
        assert order == [0, 1, 2, 3]
        assert (admission.running, admission.waiting) == (0, 0)

    run(main())


def test_a_full_queue_refuses_with_a_time_to_retry() -> None:
    async def main() -> None:
        admission = Admission(limit=1, max_waiting=1)
        async with admission.slots(1):
            waiting = asyncio.create_task(_hold(admission, 1))
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as caught:
                async with admission.slots(1):
                    pass
            assert (caught.value.status, caught.value.retry_after >= 1) == (429, True)
            with pytest.raises(RequestError, match="at most 1"):
                async with admission.slots(2):
                    pass
        await waiting

    run(main())


def test_slow_answers_lengthen_the_time_to_retry() -> None:
    async def main() -> None:
        admission = Admission(limit=1, max_waiting=3)
        for _ in range(50):
            admission.record_duration(20.0)
        async with admission.slots(1):
            waiting = [asyncio.create_task(_hold(admission, 1)) for _ in range(3)]
            await asyncio.sleep(0)
            with pytest.raises(RequestError) as caught:
                async with admission.slots(1):
                    pass
            assert 50 < caught.value.retry_after <= 60
        await asyncio.gather(*waiting)

    run(main())


@given(st.integers(0, 1 << 32))
def test_cancelling_at_any_time_loses_no_slot(seed: int) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        admission = Admission(limit=3, max_waiting=50)

        async def ask() -> None:
            async with admission.slots(rng.randint(1, 3)):
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(ask()) for _ in range(12)]
        for _ in range(30):
            await asyncio.sleep(0)
            rng.choice(tasks).cancel()
            assert admission.running <= 3
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (admission.running, admission.waiting) == (0, 0)

    run(main())


async def _hold(admission: Admission, count: int) -> None:
    async with admission.slots(count):
        pass
