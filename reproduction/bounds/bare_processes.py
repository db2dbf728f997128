"""A lower bound of the cost of two processes: the same graphs on two cores, with plain blocking sockets between them.

No TLS, no event loop, no sessions, minimal framing: a process waits for bytes, computes, sends bytes. The difference to
the same graphs in one process is the machine's cost of waking an idle core, not a cost of peers.
`python -m reproduction.bounds.bare_processes PACKAGE FIRST LAST` runs one stage. It prints the port on which it
listens, and reads the port of the next stage from its standard input.
"""

from __future__ import annotations

import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from reproduction.harness.peers import stage_processes
from reproduction.models.real import Model
from swarm.engine.base import Step
from swarm.engine.paged.engine import open_paged_engine
from swarm.model.manifest import load_manifest
from swarm.model.spans import LayerRange

_KV_TOKENS = 4096
_HEADER = struct.Struct("<II")  # start and number of tokens of a step
_HOST = "127.0.0.1"


class BareStages:
    """The first and the last socket of the chain that `bare_stages` starts."""

    def __init__(self, to_first: socket.socket, from_last: socket.socket) -> None:
        self._to_first = to_first
        self._from_last = from_last

    def decode(self, prompt: NDArray[np.int32], count: int) -> tuple[float, list[int]]:
        """As `local.decode`: tokens per second after the first token, and all tokens."""
        tokens = [self._step(prompt, 0)]
        started = time.perf_counter()
        for _ in range(count):
            tokens.append(self._step(np.array(tokens[-1:], np.int32), len(prompt) + len(tokens) - 1))
        return count / (time.perf_counter() - started), tokens

    def _step(self, tokens: NDArray[np.int32], start: int) -> int:
        self._to_first.sendall(_HEADER.pack(start, len(tokens)) + tokens.tobytes())
        return int.from_bytes(_read(self._from_last, 4), "little")


@contextmanager
def bare_stages(model: Model, spans: Sequence[LayerRange]) -> Iterator[BareStages]:
    """A process for each span, each on its own core."""
    with (
        stage_processes("reproduction.bounds.bare_processes", model, spans) as pipes,
        socket.create_server((_HOST, 0)) as result_server,
    ):
        ports = [int(stdout.readline()) for _, stdout in pipes]
        for (stdin, _), port in zip(pipes, [*ports[1:], result_server.getsockname()[1]], strict=True):
            stdin.write(f"{port}\n")
        with _connected(ports[0]) as to_first, result_server.accept()[0] as from_last:
            yield BareStages(to_first, from_last)


def main(package: Path, span: LayerRange) -> None:
    manifest = load_manifest(package)
    engine = open_paged_engine(package, manifest, span, kv_tokens=_KV_TOKENS, threads=1)
    first, last = span.first == 0, span.last == len(manifest.layers)
    with socket.create_server((_HOST, 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        with _connected(int(sys.stdin.readline())) as next_stage, server.accept()[0] as previous_stage:
            while header := _read(previous_stage, _HEADER.size):
                start, count = _HEADER.unpack(header)
                if not start:
                    engine.close("run")
                    engine.open("run", _KV_TOKENS)
                if first:
                    tokens, hidden = np.frombuffer(_read(previous_stage, 4 * count), np.int32), None
                else:
                    raw = _read(previous_stage, 4 * count * manifest.hidden_size)
                    tokens = np.zeros(count, np.int32)
                    hidden = np.frombuffer(raw, np.float32).reshape(count, manifest.hidden_size)
                step = Step(session="run", start=start, tokens=tokens, hidden=hidden, rows=int(last))
                (result,) = engine.forward([step])
                if isinstance(result, Exception):
                    raise result
                if last:
                    next_stage.sendall(int(result[-1].argmax()).to_bytes(4, "little"))
                else:
                    next_stage.sendall(_HEADER.pack(start, count) + result.tobytes())


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection((_HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read(connection: socket.socket, count: int) -> bytes:
    """Read `count` bytes; empty if the previous stage has ended."""
    return connection.recv(count, socket.MSG_WAITALL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), LayerRange(int(sys.argv[2]), int(sys.argv[3])))
