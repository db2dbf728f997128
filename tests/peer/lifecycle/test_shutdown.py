from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from peer.lifecycle.shutdown import Interrupted, Stop
from swarm.process.child_process import module_environment

# In a child process: the test process has other signal handlers, and must survive.
SIGNALS = """
import asyncio, os, signal
from peer.lifecycle.shutdown import Stop

async def main():
    exit_codes = []
    stop = Stop(exit_process=exit_codes.append)
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.requested.wait(), 20)
        assert not stop.urgent.is_set()
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.wait_for(stop.urgent.wait(), 20)
        assert exit_codes == []
        stop.on_signal()
        assert exit_codes == [130]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    stop = Stop(exit_process=exit_codes.append)
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0)
        assert not stop.requested.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.requested.wait(), 20)

signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(main())
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""


def test_the_first_signal_requests_a_stop_the_second_is_urgent_and_the_third_exits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS], env=module_environment(), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_work_is_cancelled_by_the_first_signal() -> None:
    async def main() -> None:
        stop = Stop(exit_process=lambda _: None)
        cleaned: list[str] = []

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append("cleaned up")

        asyncio.get_running_loop().call_soon(stop.on_signal)
        with pytest.raises(Interrupted):
            await stop.until_requested(work())
        assert cleaned == ["cleaned up"]

    asyncio.run(main())


def test_work_that_ends_returns_its_result_or_raises_its_error() -> None:
    async def main() -> None:
        stop = Stop(exit_process=lambda _: None)

        async def succeed() -> int:
            return 7

        async def fail() -> None:
            raise ValueError("wrong")

        assert await stop.until_requested(succeed()) == 7
        with pytest.raises(ValueError, match="wrong"):
            await stop.until_requested(fail())

    asyncio.run(main())


def test_leaving_takes_until_a_second_signal() -> None:
    async def main() -> None:
        stop = Stop(exit_process=lambda _: None)
        done: list[str] = []

        async def leave() -> None:
            await asyncio.sleep(0)
            done.append("left")
            await asyncio.sleep(60)

        stop.on_signal()
        asyncio.get_running_loop().call_later(0.01, stop.on_signal)
        await stop.until_urgent(leave())
        assert done == ["left"]

    asyncio.run(main())


def test_cancellation_leaves_no_task() -> None:
    async def main() -> None:
        stop = Stop(exit_process=lambda _: None)
        outer = asyncio.create_task(stop.until_requested(asyncio.sleep(60)))
        await asyncio.sleep(0)
        outer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await outer
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
