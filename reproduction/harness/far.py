"""A peer as if it were far away: `python -m reproduction.harness.far METHOD SECONDS BYTES_PER_S COMMAND...` runs
COMMAND so.

Every way of a step takes SECONDS longer: from the client to the first hop, from hop to hop, and back from the last.

=======  ==============================================================================================
`sleep`  plain sleeps at the hop, after a step, and once more before an answer: one thing at a time, so that
         steps which follow each other wait for each other's sleeps
`proxy`  a TCP proxy in front of the peer releases each chunk at its due time, in both directions:
         several are in flight, as on a real line, which takes BYTES_PER_S (0: any number). Looking peers
         up goes past it; sessions do not
=======  ==============================================================================================

COMMAND is what `swarm.process.child_process.module_command` makes, so that this can stand before it
(`LocalSwarm.join(prefix=...)`).
"""

from __future__ import annotations

import asyncio
import runpy
import socket
import sys

from swarm.process import telemetry

METHODS = ("sleep", "proxy")
_CHUNK = 1 << 16


def prefix(method: str, seconds: float, bytes_per_s: float = 0.0) -> list[str]:
    """What to put before a peer's command."""
    return [sys.executable, "-P", "-m", "reproduction.harness.far", method, str(seconds), str(bytes_per_s)]


def sleep_at_the_hop(seconds: float, _: float) -> None:
    """Patch this process's worker: what a step gave is there later. A session's next step waits for that."""
    from peer.batching.job import StepJob, StepOutcome
    from peer.batching.worker import Worker

    outcome = Worker.outcome

    async def late_outcome(worker: Worker, job: StepJob) -> StepOutcome:
        given = await outcome(worker, job)
        ways = 1 if job.sampling is None else 2  # from the last hop there is one back, too
        await asyncio.sleep(ways * seconds)
        return given

    Worker.outcome = late_outcome  # type: ignore[method-assign, assignment]


def proxy_before_the_peer(seconds: float, bytes_per_s: float) -> None:
    """Patch where this process's peer says that it can be reached: at a proxy of its own."""
    from peer.lifecycle import join

    running: set[asyncio.Task[None]] = set()

    def advertised(host: str, port: int) -> list[str]:
        listening = socket.create_server((host, 0))
        running.add(asyncio.create_task(serve_proxy(listening, host, port, seconds, bytes_per_s)))
        return [f"{host}:{listening.getsockname()[1]}"]

    join.announced_addresses = advertised  # type: ignore[attr-defined, assignment]


async def serve_proxy(listening: socket.socket, host: str, port: int, seconds: float, bytes_per_s: float) -> None:
    """Pass connections on to HOST:PORT, each chunk `seconds` after it came."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(
            _pass_on(reader, onward_writer, seconds, bytes_per_s), _pass_on(onward_reader, writer, seconds, bytes_per_s)
        )

    server = await asyncio.start_server(accept, sock=listening)
    await server.serve_forever()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float, bytes_per_s: float
) -> None:
    loop = asyncio.get_running_loop()
    due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def release() -> None:
        while True:
            at, data = await due.get()
            await asyncio.sleep(at - loop.time())
            if not data:
                writer.close()
                return
            writer.write(data)

    releasing = asyncio.create_task(release())
    line_free_at = 0.0
    try:
        while data := await reader.read(_CHUNK):
            line_free_at = max(loop.time(), line_free_at) + (len(data) / bytes_per_s if bytes_per_s else 0.0)
            due.put_nowait((line_free_at + seconds, data))
    except ConnectionError:
        pass
    due.put_nowait((max(loop.time(), line_free_at) + seconds, b""))
    await releasing


def main() -> None:
    telemetry.switch_off()
    method, seconds, bytes_per_s, *command = sys.argv[1:]
    if float(seconds):
        {"sleep": sleep_at_the_hop, "proxy": proxy_before_the_peer}[method](float(seconds), float(bytes_per_s))
    # [python, -P, -m, swarm.process.child_process, MODULE, ...]
    sys.argv = ["swarm.process.child_process", *command[command.index("swarm.process.child_process") + 1 :]]
    runpy.run_module("swarm.process.child_process", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
