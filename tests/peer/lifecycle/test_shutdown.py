from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from peer.lifecycle.shutdown import Interrupted, Stop
from swarm.process.child_process import module_environment

# In a process of its own: a process that runs other tests has had other handlers, and must outlive this one.
SIGNALS = """
import asyncio, os, signal
from peer.lifecycle.shutdown import Stop

async def main():
    ended = []
    stop = Stop(end=ended.append)
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.asked.wait(), 20)
        assert not stop.urgent.is_set()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(stop.urgent.wait(), 20)
        assert ended == []
        stop.signal()
        assert ended == [130]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    stop = Stop(end=ended.append)
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert not stop.asked.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.asked.wait(), 20)

signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(main())
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_the_first_signal_asks_the_second_hurries_and_the_third_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS], env=module_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_work_is_cancelled_by_the_first_signal() -> None:
    async def main() -> None:
        stop = Stop(end=lambda _: None)
        cleaned: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append("cleaned up")

        asyncio.get_running_loop().call_soon(stop.signal)
        with pytest.raises(Interrupted):
            await stop.interrupting(work())
        assert cleaned == ["cleaned up"]

    asyncio.run(main())


def test_work_that_ends_gives_its_result_or_its_error() -> None:
    async def main() -> None:
        stop = Stop(end=lambda _: None)

        async def seven() -> int:
            return 7

        async def wrong() -> None:
            raise ValueError("wrong")

        assert await stop.interrupting(seven()) == 7
        with pytest.raises(ValueError, match="wrong"):
            await stop.interrupting(wrong())

    asyncio.run(main())


def test_leaving_waits_until_somebody_hurries() -> None:
    async def main() -> None:
        stop = Stop(end=lambda _: None)
        done: list[str] = []

        async def leave() -> None:
            await asyncio.sleep(0)
            done.append("left")
            await asyncio.sleep(60)

        stop.signal()
        asyncio.get_running_loop().call_later(0.01, stop.signal)
        await stop.hurrying(leave())
        assert done == ["left"]

    asyncio.run(main())


def test_being_cancelled_leaves_no_task() -> None:
    async def main() -> None:
        stop = Stop(end=lambda _: None)
        outer = asyncio.create_task(stop.interrupting(asyncio.sleep(60)))
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
