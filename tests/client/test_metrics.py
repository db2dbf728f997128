from __future__ import annotations

import numpy as np
import pytest

from client.metrics import Meter, Metrics
from client.pipeline.circuit import Answer
from swarm.wire.messages import Forward, HopTrace, Output

HOPS = [("a" * 32, "a", "0:3"), ("b" * 32, "b", "3:6")]


def answer(
    sent_at: float,
    *,
    tokens: int = 1,
    rows: int = 1,
    offsets: tuple[float, float] = (0.0, 0.0),
    codec_s: float = 0.00025,
) -> Answer:
    """A step of 10 ms: 1 ms to each hop and back, with the encoding on the hop before; 3 and 4 ms on the hops.

    `offsets` are the errors of the hops' clocks.
    """
    traces = []
    for (peer, _, _), start, on_hop_s, offset in zip(HOPS, (0.001, 0.005), (0.003, 0.004), offsets, strict=True):
        traces.append(
            HopTrace(
                peer=peer,
                queue_s=0.0005,
                compute_s=on_hop_s - 0.001,
                codec_s=codec_s,
                received_at=sent_at + start + offset,
                sent_at=sent_at + start + on_hop_s + offset,
            )
        )
    forward = Forward(session="0" * 8, epoch=1, step=0, start=0, rows=rows, tokens=np.zeros(tokens, np.int32))
    output = Output(session="0" * 8, epoch=1, step=0, ids=np.zeros(rows, np.int32), trace=tuple(traces))
    return Answer(forward=forward, output=output, sent_at=sent_at, received_at=sent_at + 0.010)


def measured(offsets: tuple[float, float] = (0.0, 0.0), codec_s: float = 0.00025) -> Metrics:
    now = [100.0]
    meter = Meter(lambda: now[0])
    meter.on_answer(answer(100.5, tokens=8, rows=0, offsets=offsets))
    meter.on_answer(answer(100.6, tokens=8, rows=1, offsets=offsets))
    for place in range(10):
        meter.on_answer(answer(100.612 + 0.012 * place, offsets=offsets, codec_s=codec_s))
    return meter.metrics(prompt_tokens=16, reused_tokens=3, new_tokens=11, repairs=0, route="a → b", hops=HOPS)


def test_a_tokens_time_is_the_sum_of_its_parts() -> None:
    metrics = measured()
    assert metrics.ttft_s == pytest.approx(0.61)
    assert metrics.new_tokens == 11
    assert metrics.token_s == pytest.approx(0.012)
    assert metrics.tokens_per_second == pytest.approx(1 / 0.012)
    assert metrics.client_s == pytest.approx(0.002)
    assert metrics.return_s == pytest.approx(0.00075)
    a, b = metrics.hops
    assert (a.network_s, a.queue_s, a.compute_s, a.codec_s, a.other_s) == pytest.approx(
        (0.001, 0.0005, 0.002, 0.00025, 0.0005)
    )
    assert (b.network_s, b.compute_s, b.codec_s, b.other_s) == pytest.approx((0.00075, 0.003, 0.00025, 0.0005))
    assert sum_of_parts(metrics) == pytest.approx(metrics.token_s)


def sum_of_parts(metrics: Metrics) -> float:
    hops = sum(h.network_s + h.queue_s + h.compute_s + h.codec_s + h.other_s for h in metrics.hops)
    return hops + metrics.return_s + metrics.client_s


def test_an_encoding_time_of_the_step_before_counts_up_to_the_whole_leg() -> None:
    metrics = measured(codec_s=0.5)
    assert [hop.codec_s for hop in metrics.hops] == pytest.approx([0.001, 0.001])
    assert [*(hop.network_s for hop in metrics.hops), metrics.return_s] == pytest.approx([0.001, 0, 0])
    assert sum_of_parts(metrics) == pytest.approx(metrics.token_s)


@pytest.mark.parametrize("offsets", [(5000.0, -3.0), (-0.5, 0.5), (1e6, 1e6)])
def test_if_clocks_differ_the_network_time_is_divided_evenly(offsets: tuple[float, float]) -> None:
    metrics = measured(offsets)
    network = [*(hop.network_s for hop in metrics.hops), metrics.return_s]
    assert network == pytest.approx([0.001, 0.00075, 0.00075], abs=1e-6)
    assert sum_of_parts(metrics) == pytest.approx(metrics.token_s)


def test_steps_over_an_earlier_route_are_left_out() -> None:
    meter = Meter(lambda: 0.0)
    for place in range(4):
        meter.on_answer(answer(1.0 + place))
    other = [("c" * 32, "c", "0:6")]
    metrics = meter.metrics(prompt_tokens=1, reused_tokens=0, new_tokens=4, repairs=1, route="c", hops=other)
    assert metrics.token_s == 0.0
    assert metrics.hops[0].compute_s == 0.0
    assert metrics.tokens_per_second == pytest.approx(1.0)


def test_a_single_token_has_no_rate() -> None:
    meter = Meter(lambda: 0.0)
    meter.on_answer(answer(1.0))
    metrics = meter.metrics(prompt_tokens=1, reused_tokens=0, new_tokens=1, repairs=0, route="", hops=[])
    assert (metrics.tokens_per_second, metrics.new_tokens, metrics.hops) == (0.0, 1, ())
