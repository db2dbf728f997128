"""The HTTP server: access, limits on callers, disconnects, and shutdown."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from client.gateway.http import server
from client.gateway.keys import Keys
from tests.client.gateway.http.strict_sse import chunks, text_of
from tests.client.gateway.toy_gateway import PATIENCE_S, ToyGateway, toy_gateway
from tests.client.scripted_peer import toy_text
from tests.client.toy_world import ToyTokenizer

KEY = "sk-a-key-for-tests"
LONG = {"model": "toy", "prompt": "abc", "max_tokens": 300}
TEXT = ToyTokenizer().decode(toy_text(ToyTokenizer().encode("abc"), 300))


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def connect(gateway: ToyGateway) -> Iterator[socket.socket]:
    url = httpx.URL(gateway.url)
    with socket.create_connection((url.host, url.port or 0), timeout=PATIENCE_S) as connection:
        yield connection


def request_bytes(plain: dict[str, Any]) -> bytes:
    body = json.dumps(plain).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + f"content-length: {len(body)}\r\n\r\n".encode() + body


def read_until_closed(connection: socket.socket) -> bytes:
    """Read everything until the gateway closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            received += part
    return received


def is_closed(connection: socket.socket) -> bool:
    """Wait until the gateway closes the connection."""
    read_until_closed(connection)
    return True


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_caller_closes_its_sessions_on_every_hop(stream: bool) -> None:
    with toy_gateway() as gateway:
        gateway.slow_down(0.05)
        with connect(gateway) as connection:
            connection.sendall(request_bytes({**LONG, "stream": stream, "n": 2}))
            wait_for(lambda: gateway.sessions == 6, "two sessions on three peers")
        closed_at = time.monotonic()
        wait_for(lambda: gateway.sessions == 0, "no session")
        assert time.monotonic() - closed_at < 10  # about a second on an idle machine
        assert "swarm_gateway_vanished_total" in gateway.http.get("/metrics").text


def test_a_caller_that_disconnects_while_it_waits_leaves_the_queue() -> None:
    with toy_gateway(max_concurrent=1) as gateway:
        gateway.slow_down(0.05)
        with connect(gateway) as first, connect(gateway) as second:
            first.sendall(request_bytes(LONG))
            wait_for(lambda: gateway.sessions == 3, "the first runs")
            second.sendall(request_bytes(LONG))
            wait_for(lambda: "swarm_gateway_waiting 1.0" in gateway.http.get("/metrics").text, "the second waits")
        wait_for(lambda: gateway.sessions == 0, "no session")
        gateway.slow_down(0)
        assert gateway.http.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200


def test_a_full_gateway_refuses_with_a_time_to_retry() -> None:
    with toy_gateway(max_concurrent=1, max_waiting=0) as gateway:
        gateway.slow_down(0.05)
        with connect(gateway) as first:
            first.sendall(request_bytes(LONG))
            wait_for(lambda: gateway.sessions == 3, "the first runs")
            refused = gateway.http.post("/v1/completions", json=LONG)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert gateway.http.post("/v1/completions", json={**LONG, "n": 2}).json()["error"]["param"] == "n"


def test_a_caller_that_does_not_read_is_disconnected() -> None:
    """When the system's buffers are full, the caller has `write_s` to read."""
    with toy_gateway(write_s=0.5) as gateway, connect(gateway) as connection:
        (served,) = gateway.pool.served
        served.name = "x" * (64 << 10)  # is in every event, so that few events fill the buffers
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(request_bytes({**LONG, "model": served.digest, "stream": True, "n": 2}))
        wait_for(lambda: "swarm_gateway_vanished_total{" in gateway.http.get("/metrics").text, "it is disconnected")
        wait_for(lambda: gateway.sessions == 0, "no session")


def test_pipelined_requests_close_the_connection() -> None:
    with toy_gateway() as gateway, connect(gateway) as connection:
        gateway.slow_down(0.05)
        connection.sendall(request_bytes(LONG) * 3)
        assert is_closed(connection)
        wait_for(lambda: gateway.sessions == 0, "no session")


def test_silent_connections_do_not_block_others_and_are_closed() -> None:
    with toy_gateway(header_s=1.0) as gateway, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connect(gateway)) for _ in range(200)]
        for connection in silent[:100]:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: loc")
        assert gateway.http.post("/v1/completions", json=LONG).json()["choices"][0]["text"] == TEXT
        assert all(is_closed(connection) for connection in silent)


def test_headers_and_connections_are_limited() -> None:
    with toy_gateway(max_header=4096, max_connections=8) as gateway:
        with connect(gateway) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            with contextlib.suppress(OSError):
                for _ in range(100):
                    connection.sendall(b"x-more: " + b"y" * 1000 + b"\r\n")
            assert is_closed(connection)
        with connect(gateway) as connection:  # also where all headers arrive at once
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-more: " + b"y" * 4096 + b"\r\n\r\n")
            assert b" 400 " in read_until_closed(connection)
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(connect(gateway)) for _ in range(20)]
            assert is_closed(many[-1])
        wait_for(lambda: gateway.http.get("/health/live").status_code == 200, "others are served again")


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n"


def test_trailers_are_bounded_and_are_not_headers() -> None:
    with toy_gateway(max_header=4096, keys=Keys([KEY])) as gateway:
        with connect(gateway) as connection:
            connection.sendall(CHUNKED + b"\r\n0\r\nauthorization: Bearer " + KEY.encode() + b"\r\n\r\n")
            assert b" 401 " in connection.recv(65536)
        with connect(gateway) as connection:
            connection.sendall(CHUNKED + f"authorization: Bearer {KEY}\r\n\r\n0\r\nx-more: ".encode())
            with contextlib.suppress(OSError):
                for _ in range(100):
                    connection.sendall(b"y" * 1000)
            assert is_closed(connection)


@pytest.mark.parametrize("rest", [b"\r\n", b"5\r\nabcde\r\n"], ids=["empty lines", "the rest of an unread body"])
def test_a_connection_without_a_next_request_is_closed_even_if_it_sends_bytes(rest: bytes) -> None:
    answered = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
    refused = b"DELETE / HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with toy_gateway(header_s=0.3) as gateway, connect(gateway) as connection:
        connection.sendall(answered if rest == b"\r\n" else refused)
        connection.recv(65536)

        def is_closed_by_gateway() -> bool:
            try:
                connection.sendall(rest)
            except ConnectionError:
                return True
            return False

        wait_for(is_closed_by_gateway, "closed")


def test_an_unread_whole_answer_closes_the_connection() -> None:
    with toy_gateway(write_s=0.2) as gateway, connect(gateway) as connection:
        (served,) = gateway.pool.served
        served.name = "x" * (8 << 20)  # an answer larger than the buffers of the system
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        address = connection.getsockname()

        def is_open() -> bool:
            return any(each.raddr == address for each in psutil.Process().net_connections("tcp4"))

        wait_for(is_open, "open")
        wait_for(lambda: not is_open(), "closed")


def test_the_number_of_large_bodies_is_bounded() -> None:
    long = {**LONG, "prompt": "a" * 70_000}
    with toy_gateway(max_large_bodies=1) as gateway:

        def answer() -> tuple[int, str]:
            response = gateway.http.post("/v1/completions", json=long)
            return response.status_code, response.json()["error"]["code"]

        with connect(gateway) as connection:
            connection.sendall(request_bytes(long)[:-10])
            wait_for(lambda: answer() == (429, "rate_limit_exceeded"), "its slot is taken")
            assert gateway.http.post("/v1/completions", json={**LONG, "max_tokens": 3}).status_code == 200
        wait_for(lambda: answer() == (400, "context_length_exceeded"), "its slot is free")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
@pytest.mark.parametrize(
    ("soft", "hard", "connections", "new_soft"),
    [(20_000, 20_000, 2048, None), (1024, 500_000, 2048, 2304), (1024, 1024, 768, 1024), (300, 300, 150, 300)],
)
def test_connections_leave_file_descriptors_for_peers(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, connections: int, new_soft: int | None
) -> None:
    import resource

    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: limits_set.append(limits))
    assert server._max_connections(2048) == connections
    assert limits_set == ([] if new_soft is None else [(new_soft, hard)])


def test_neither_keys_nor_prompts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    body = {**LONG, "prompt": "the secret question", "max_tokens": 3}
    with toy_gateway(keys=Keys([KEY])) as gateway:
        for key in (KEY, "sk-a-wrong-key"):
            gateway.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
        (served,) = gateway.pool.served
        served.client.generate = None  # type: ignore[assignment,method-assign]  # provokes a bug, which is logged
        failed = gateway.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
        assert failed.status_code == 500
    assert "a bug of this program" in caplog.text
    for secret in ("secret", KEY, "sk-a-wrong-key"):
        assert secret not in caplog.text


def test_a_body_that_does_not_arrive_times_out() -> None:
    with toy_gateway(body_s=0.3) as gateway, connect(gateway) as connection:
        connection.sendall(request_bytes(LONG)[:-10])
        assert b" 408 " in connection.recv(65536)


def test_sixty_four_concurrent_streams_have_the_right_text() -> None:
    texts: list[str] = []
    with toy_gateway() as gateway:

        def ask() -> None:
            with httpx.Client(base_url=gateway.url, timeout=PATIENCE_S, verify=False) as http:
                response = http.post("/v1/completions", json={**LONG, "max_tokens": 5, "stream": True})
                texts.append(text_of(chunks(response.content)))

        threads = [threading.Thread(target=ask) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [TEXT[:5]] * 64
        assert gateway.sessions == 0


def test_without_a_key_only_the_page_and_health_are_open() -> None:
    with toy_gateway(keys=Keys([KEY, "another-key"])) as gateway:
        for path in ("/v1/models", "/api/swarm", "/metrics", "/v1/chat/completions", "/v1/nothing"):
            for header in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": f"Basic {KEY}"}):
                refused = gateway.http.get(path, headers=header)
                assert refused.status_code == 401
                assert refused.json()["error"]["code"] == "invalid_api_key"
                assert refused.headers["www-authenticate"] == "Bearer"
        for key in (KEY, "another-key"):
            assert gateway.http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
        assert gateway.http.get("/").status_code == 200
        assert gateway.http.get("/health/live").status_code == 200


def test_without_keys_only_host_names_of_this_machine_are_accepted() -> None:
    with toy_gateway() as gateway:
        for name in ("evil.example", "127.evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8000"):
            assert gateway.http.get("/v1/models", headers={"host": name}).status_code == 403
        for name in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
            assert gateway.http.get("/v1/models", headers={"host": name}).status_code == 200


def test_only_allowed_origins_get_cors_headers() -> None:
    preflight = {"origin": "https://site.example", "access-control-request-method": "POST"}
    with toy_gateway() as gateway:
        assert "access-control-allow-origin" not in gateway.http.get("/v1/models", headers=preflight).headers
        assert gateway.http.options("/v1/chat/completions", headers=preflight).status_code == 405
    with toy_gateway(keys=Keys([KEY]), allow_origins=("https://site.example",)) as gateway:
        allowed = gateway.http.options("/v1/chat/completions", headers=preflight)
        assert allowed.headers["access-control-allow-origin"] == "https://site.example"
        preflight["access-control-request-headers"] = "authorization,x-stainless-os"  # OpenAI's package for browsers
        assert gateway.http.options("/v1/chat/completions", headers=preflight).status_code == 200
        other = gateway.http.options("/v1/chat/completions", headers={**preflight, "origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_shutdown_lets_running_answers_finish_and_accepts_no_more() -> None:
    with toy_gateway(grace_s=30.0) as gateway:
        gateway.slow_down(0.005)
        with gateway.http.stream("GET", "/api/swarm/events") as watching:
            for _ in watching.iter_bytes():
                break
            with connect(gateway) as connection:
                connection.sendall(request_bytes({**LONG, "stream": True, "max_tokens": 50}))
                wait_for(lambda: gateway.sessions == 3, "it runs")
                gateway.request_shutdown()
                answer = read_until_closed(connection)
        assert b"data: [DONE]" in answer
        assert gateway.ended.wait(PATIENCE_S)
        with pytest.raises(httpx.ConnectError):
            httpx.Client(base_url=gateway.url, verify=False).get("/health")


def test_a_shutdown_cancels_requests_after_the_grace_period() -> None:
    with toy_gateway(grace_s=1.0) as gateway:
        gateway.slow_down(0.5)
        with connect(gateway) as connection:
            connection.sendall(request_bytes(LONG))
            wait_for(lambda: gateway.sessions == 3, "it runs")
            gateway.request_shutdown()
            answer = read_until_closed(connection)
            assert b'"code":"ending"' in answer
            assert b"retry-after: 5" in answer
        assert gateway.ended.wait(PATIENCE_S)
        assert gateway.world.swarm.open_sessions == 0


def test_a_forced_shutdown_stops_at_once() -> None:
    with toy_gateway(grace_s=300.0) as gateway:
        gateway.slow_down(0.5)
        with connect(gateway) as connection:
            connection.sendall(request_bytes(LONG))
            wait_for(lambda: gateway.sessions == 3, "it runs")
            gateway.request_shutdown()
            gateway.loop.call_soon_threadsafe(gateway.shutdown.forced.set)
            assert gateway.ended.wait(PATIENCE_S)
        assert gateway.world.swarm.open_sessions == 0


def test_it_is_ready_only_while_tokens_are_generated() -> None:
    with toy_gateway(probing=True, probe_s=0.2) as gateway:
        wait_for(lambda: gateway.http.get("/health").status_code == 200, "ready")
        for peer in gateway.peers:
            gateway.call(_kill(peer))
        wait_for(lambda: gateway.http.get("/health").status_code == 503, "not ready")
        plain = gateway.http.get("/health").json()
        assert (plain["live"], plain["ready"]) == (True, False)
        wait_for(lambda: gateway.http.get("/health").json()["models"]["toy"]["problem"], "its problem is reported")


def test_the_swarm_state_has_the_routes_in_use() -> None:
    with toy_gateway() as gateway:
        gateway.slow_down(0.05)
        with connect(gateway) as connection:
            connection.sendall(request_bytes(LONG))
            wait_for(lambda: gateway.sessions == 3, "it runs")
            wait_for(lambda: gateway.http.get("/api/swarm").json()["models"][0]["routes_in_use"], "its route is shown")
            (model,) = gateway.http.get("/api/swarm").json()["models"]
            assert [hop["name"] for hop in model["routes_in_use"][0]["hops"]] == ["a", "b", "c"]
            assert (model["covered"], model["id"], len(model["peers"])) == (True, "toy", 4)
            gateway.call(_kill(gateway.world.swarm.peers["a"]))
            wait_for(lambda: not gateway.http.get("/api/swarm").json()["models"][0]["covered"], "not covered")
            (model,) = gateway.http.get("/api/swarm").json()["models"]
            assert model["missing"] == ["0:2"]


def _kill(peer: Any) -> Any:
    async def kill() -> None:
        peer.die()

    return kill
