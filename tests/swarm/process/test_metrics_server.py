"""The HTTP server of the metrics, with valid and invalid requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from swarm.errors import ConfigError
from swarm.process.metrics_server import MetricsServer
from swarm.transport.address import Address

PAGE = b"metric 1\n" * 1000


def run(test: Callable[[MetricsServer], Awaitable[None]]) -> None:
    async def main() -> None:
        page = MetricsServer(lambda: PAGE)
        await page.start(Address("127.0.0.1", 0))
        try:
            async with asyncio.timeout(30):
                await test(page)
        finally:
            await page.close()

    asyncio.run(main())


async def ask(page: MetricsServer, head: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
    try:
        with contextlib.suppress(OSError):
            writer.write(head)
            await writer.drain()
            return await reader.read()
        return b""
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize(
    ("head", "status", "body"),
    [
        (b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", b"200", PAGE),
        (b"GET /metrics?x=1 HTTP/1.0\r\n\r\n", b"200", PAGE),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200", b""),
        (b"GET / HTTP/1.1\r\n\r\n", b"404", b"the only path is /metrics\n"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405", b"only GET and HEAD are allowed\n"),
        (b"\x16\x03\x01 nonsense\r\n\r\n", b"400", b"this is not an HTTP request\n"),
    ],
)
def test_only_get_metrics_is_served(head: bytes, status: bytes, body: bytes) -> None:
    async def test(page: MetricsServer) -> None:
        answer = await ask(page, head)
        assert answer.split(b" ")[1] == status
        assert answer.partition(b"\r\n\r\n")[2] == body

    run(test)


def test_silent_and_too_large_requests_do_not_block_others() -> None:
    async def test(page: MetricsServer) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(8):
                _, writer = await asyncio.open_connection("127.0.0.1", page.port)
                stack.callback(writer.close)
            assert await ask(page, b"x" * 100_000) == b""
            assert PAGE in await ask(page, b"GET /metrics HTTP/1.1\r\n\r\n")

    run(test)


def test_a_port_in_use_is_named() -> None:
    async def test(page: MetricsServer) -> None:
        with pytest.raises(ConfigError, match=f"127.0.0.1:{page.port}"):
            await MetricsServer(lambda: b"").start(Address("127.0.0.1", page.port))

    run(test)
