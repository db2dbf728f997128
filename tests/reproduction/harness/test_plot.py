"""The picture of a load run: what it reads, and that it is an image."""

from __future__ import annotations

from xml.etree import ElementTree

from reproduction.experiment import Report, Row
from reproduction.harness.plot import draw, series_of


def test_a_run_is_drawn_with_a_line_for_each_thing_that_was_measured() -> None:
    measured = ("together", "first token, p50", "first token, p99", "between tokens, p50", "between tokens, p99")
    rows = [
        Row(configuration=f"{streams} streams, {what}", value=10.0 * streams + place, unit="ms")
        for streams in (1, 8, 64)
        for place, what in enumerate(measured)
    ]
    plain = {"rows": [vars(row) for row in Report(experiment="gateway_load", machine={}, rows=rows, ratios={}).rows]}
    assert series_of(plain)["together"] == [(1, 10.0), (8, 80.0), (64, 640.0)]
    image = ElementTree.fromstring(draw(plain))
    lines = image.findall(".//{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3] * 5
