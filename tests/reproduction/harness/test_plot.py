"""The plot of a load run: the series that it reads, and the image."""

from __future__ import annotations

from xml.etree import ElementTree

from reproduction.experiment import Report, Row
from reproduction.harness.plot import draw, read_series


def test_a_run_is_drawn_with_a_line_for_each_quantity() -> None:
    measured = ("together", "first token, p50", "first token, p99", "between tokens, p50", "between tokens, p99")
    rows = [
        Row(configuration=f"{streams} streams, {quantity}", value=10.0 * streams + index, unit="ms")
        for streams in (1, 8, 64)
        for index, quantity in enumerate(measured)
    ]
    plain = {"rows": [vars(row) for row in Report(experiment="gateway_load", machine={}, rows=rows, ratios={}).rows]}
    assert read_series(plain)["together"] == [(1, 10.0), (8, 80.0), (64, 640.0)]
    image = ElementTree.fromstring(draw(plain))
    lines = image.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3] * 5
