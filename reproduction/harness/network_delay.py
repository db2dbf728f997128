"""Delays a peer's links.

`python -m reproduction.harness.network_delay METHOD SECONDS BYTES_PER_S COMMAND...` runs COMMAND with delayed links.

Each message of a step arrives SECONDS later: from the client to the first hop, from hop to hop, and back from the last.

=======  ==============================================================================================
`sleep`  the hop sleeps after each step, and once more before an answer. Steps of a session wait for each
         other's sleeps
`proxy`  a TCP proxy in front of the peer releases each chunk at its due time, in both directions. Several
         chunks are in flight, as on a real link of BYTES_PER_S (0: unlimited). Sessions use the proxy,
         look-ups do not
=======  ==============================================================================================

COMMAND comes from `swarm.process.child_process.module_command`, and `LocalSwarm.join(prefix=...)` puts this before it.
"""

from __future__ import annotations

import asyncio
import runpy
import socket
import sys

from swarm.process import telemetry

METHODS = ("sleep", "proxy")
_CHUNK = 1 << 16


def delay_prefix(method: str, seconds: float, bytes_per_s: float = 0.0) -> list[str]:
    """The words before a peer's command."""
    return [sys.executable, "-P", "-m", "reproduction.harness.network_delay", method, str(seconds), str(bytes_per_s)]


def delay_by_sleep(seconds: float, _: float) -> None:
    """Patch the worker of this process: each result comes later, and the session's next step waits for it."""
    from peer.batching.step_job import StepJob, StepOutcome
    from peer.batching.worker import Worker

    outcome = Worker.outcome

    async def delayed_outcome(worker: Worker, job: StepJob) -> StepOutcome:
        result = await outcome(worker, job)
        messages = 1 if job.sampling is None else 2  # The last hop also sends the answer back.
        await asyncio.sleep(messages * seconds)
        return result

    Worker.outcome = delayed_outcome  # type: ignore[method-assign, assignment]


def delay_by_proxy(seconds: float, bytes_per_s: float) -> None:
    """Patch the addresses that the peer of this process announces: a proxy instead of itself."""
    from peer.lifecycle import join

    running: set[asyncio.Task[None]] = set()

    def announced_proxy(host: str, port: int) -> list[str]:
        listener = socket.create_server((host, 0))
        running.add(asyncio.create_task(serve_proxy(listener, host, port, seconds, bytes_per_s)))
        return [f"{host}:{listener.getsockname()[1]}"]

    join.announced_addresses = announced_proxy  # type: ignore[attr-defined, assignment]


async def serve_proxy(listener: socket.socket, host: str, port: int, seconds: float, bytes_per_s: float) -> None:
    """Forward connections to HOST:PORT, each chunk `seconds` after it arrived."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer_reader, peer_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(
            _forward(reader, peer_writer, seconds, bytes_per_s), _forward(peer_reader, writer, seconds, bytes_per_s)
        )

    server = await asyncio.start_server(accept, sock=listener)
    await server.serve_forever()


async def _forward(
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
    link_free_at = 0.0
    try:
        while data := await reader.read(_CHUNK):
            link_free_at = max(loop.time(), link_free_at) + (len(data) / bytes_per_s if bytes_per_s else 0.0)
            due.put_nowait((link_free_at + seconds, data))
    except ConnectionError:
        pass
    due.put_nowait((max(loop.time(), link_free_at) + seconds, b""))
    await releasing


def main() -> None:
    telemetry.switch_off()
    method, seconds, bytes_per_s, *command = sys.argv[1:]
    if float(seconds):
        {"sleep": delay_by_sleep, "proxy": delay_by_proxy}[method](float(seconds), float(bytes_per_s))
    # [python, -P, -m, swarm.process.child_process, MODULE, ...]
    sys.argv = ["swarm.process.child_process", *command[command.index("swarm.process.child_process") + 1 :]]
    runpy.run_module("swarm.process.child_process", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
