from __future__ import annotations

import asyncio
import subprocess
import sys

from swarm.process import event_loop


def test_the_commands_run_on_uvloop() -> None:
    async def loop_module() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert event_loop.run(loop_module()) == "uvloop"


def test_without_uvloop_the_commands_run_on_asyncios_loop() -> None:
    program = """
import sys
sys.modules["uvloop"] = None
from swarm.process import event_loop
import asyncio
async def loop_module(): return type(asyncio.get_running_loop()).__module__
print(event_loop.run(loop_module()))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "asyncio.unix_events"
