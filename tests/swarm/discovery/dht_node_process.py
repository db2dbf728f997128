"""A DHT node in a process of its own, for tests: `python -m tests.swarm.discovery.dht_node_process [CLOCK_OFFSET]`.

Prints the pid of its daemon and its addresses on one line, and runs until it is killed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from swarm.discovery.dht import HivemindDirectory, import_hivemind


async def main(offset: float) -> None:
    if offset:
        import_hivemind()
        import hivemind.dht.protocol

        hivemind.dht.protocol.get_dht_time = lambda: time.time() + offset
    directory = await HivemindDirectory.start(host="127.0.0.1", port=0, announce_hosts=["127.0.0.1"])
    sys.stdout.write(f"{directory.daemon_pid} {' '.join(directory.addresses)}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.0))
