from __future__ import annotations

import asyncio
import subprocess
import sys

from swarm.process import event_loop


def test_the_commands_run_on_uvloop() -> None:
    async def where() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert event_loop.run(where()) == "uvloop"


def test_without_uvloop_they_run_on_asyncios_own_loop() -> None:
    program = """
import sys
sys.modules["uvloop"] = None
from swarm.process import event_loop
import asyncio
async def where(): return type(asyncio.get_running_loop()).__module__
print(event_loop.run(where()))
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "asyncio.unix_events"
