"""The least that two processes cost: the same graphs on two cores, and plain blocking sockets between them.

No TLS, no event loop, no sessions, no framing worth the name: a process waits for bytes, computes, sends bytes. What is
missing to the same graphs in one process is what this machine takes for waking an idle core, and nothing of a peer.
`python -m reproduction.bounds.bare_processes PACKAGE FIRST LAST` is such a stage; it prints the port it listens at,
and is told on its standard input where the next one is.
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
_HEADER = struct.Struct("<II")  # where a step starts, and of how many tokens it is
_HOST = "127.0.0.1"


class BareStages:
    """Made by `bare_stages`."""

    def __init__(self, to_first: socket.socket, from_last: socket.socket) -> None:
        self._to_first = to_first
        self._from_last = from_last

    def decode(self, prompt: NDArray[np.int32], count: int) -> tuple[float, list[int]]:
        """As `local.decode`: tokens a second after the first, and all tokens."""
        tokens = [self._step(prompt, 0)]
        began = time.perf_counter()
        for _ in range(count):
            tokens.append(self._step(np.array(tokens[-1:], np.int32), len(prompt) + len(tokens) - 1))
        return count / (time.perf_counter() - began), tokens

    def _step(self, tokens: NDArray[np.int32], start: int) -> int:
        self._to_first.sendall(_HEADER.pack(start, len(tokens)) + tokens.tobytes())
        return int.from_bytes(_read(self._from_last, 4), "little")


@contextmanager
def bare_stages(model: Model, spans: Sequence[LayerRange]) -> Iterator[BareStages]:
    """A process for each span, each on a core of its own."""
    with (
        stage_processes("reproduction.bounds.bare_processes", model, spans) as ends,
        socket.create_server((_HOST, 0)) as home,
    ):
        ports = [int(stdout.readline()) for _, stdout in ends]
        for (stdin, _), port in zip(ends, [*ports[1:], home.getsockname()[1]], strict=True):
            stdin.write(f"{port}\n")
        with _connected(ports[0]) as to_first, home.accept()[0] as from_last:
            yield BareStages(to_first, from_last)


def main(package: Path, span: LayerRange) -> None:
    manifest = load_manifest(package)
    engine = open_paged_engine(package, manifest, span, kv_tokens=_KV_TOKENS, threads=1)
    first, last = span.first == 0, span.last == len(manifest.layers)
    with socket.create_server((_HOST, 0)) as server:
        sys.stdout.write(f"{server.getsockname()[1]}\n")
        sys.stdout.flush()
        with _connected(int(sys.stdin.readline())) as onward, server.accept()[0] as source:
            while header := _read(source, _HEADER.size):
                start, count = _HEADER.unpack(header)
                if not start:
                    engine.close("run")
                    engine.open("run", _KV_TOKENS)
                if first:
                    tokens, hidden = np.frombuffer(_read(source, 4 * count), np.int32), None
                else:
                    raw = _read(source, 4 * count * manifest.hidden_size)
                    tokens = np.zeros(count, np.int32)
                    hidden = np.frombuffer(raw, np.float32).reshape(count, manifest.hidden_size)
                step = Step(session="run", start=start, tokens=tokens, hidden=hidden, rows=int(last))
                (result,) = engine.forward([step])
                if isinstance(result, Exception):
                    raise result
                if last:
                    onward.sendall(int(result[-1].argmax()).to_bytes(4, "little"))
                else:
                    onward.sendall(_HEADER.pack(start, count) + result.tobytes())


def _connected(port: int) -> socket.socket:
    connection = socket.create_connection((_HOST, port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _read(source: socket.socket, count: int) -> bytes:
    """Empty where the stage before has ended."""
    return source.recv(count, socket.MSG_WAITALL)


if __name__ == "__main__":
    main(Path(sys.argv[1]), LayerRange(int(sys.argv[2]), int(sys.argv[3])))
