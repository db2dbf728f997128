"""The documentation matches the repository: links, paths, messages, metrics, errors, records, options of a client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from client.config import ClientConfig, GenerationConfig
from client.gateway.metrics import GatewayMetrics
from peer.announcing.metrics import PeerMetrics
from peer.sessions.service import Load
from swarm.discovery.records import PeerLoad, PeerRecord
from swarm.errors import SwarmError
from swarm.model.manifest import LayerSpec, Manifest, StaticSpec
from swarm.sampling import Sampling
from swarm.wire.codec import MESSAGES

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
REFERENCE = ROOT / "docs" / "reference"
LINK = re.compile(r"""\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)\"""")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)+\.(?:py|md|json|yml)")
README_LINES = 150


def without_code_blocks(page: str) -> str:
    return re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)


def all_errors(kind: type[SwarmError] = SwarmError) -> Iterator[type[SwarmError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == SwarmError.__module__:  # tests define some of their own
            yield from all_errors(child)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_path_of_a_page_exists(page: Path) -> None:
    text = page.read_text()
    links = [first or second for first, second in LINK.findall(without_code_blocks(text))]
    targets = [link.partition("#")[0] for link in links if not re.match(r"https?:|#", link)]
    assert [target for target in targets if not (page.parent / target).exists()] == []
    paths = [path for code in CODE.findall(without_code_blocks(text)) for path in re.split(r"[\s,]+", code)]
    assert [path for path in paths if PATH.fullmatch(path) and not (ROOT / path).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / first).resolve() for first, _ in LINK.findall(index.read_text())}
    assert [page for page in (ROOT / "docs").rglob("*.md") if page != index and page.resolve() not in linked] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_the_page_on_the_wire_protocol_has_every_message_and_field() -> None:
    page = (REFERENCE / "wire-protocol.md").read_text()
    missing = [kind for kind in MESSAGES if f"**{kind}**" not in page]
    for kind, message in MESSAGES.items():
        missing += [f"{kind}.{entry.name}" for entry in fields(message) if f"`{entry.name}`" not in page]  # type: ignore[arg-type]  # each is a dataclass
    missing += [f"sampling.{entry.name}" for entry in fields(Sampling) if f"| `{entry.name}` |" not in page]
    assert missing == []


def test_the_page_on_troubleshooting_has_every_error_with_its_exit_code() -> None:
    page = (ROOT / "docs" / "how-to" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", page, re.MULTILINE)
    listed = {(code, name, int(exit_code)) for code, name, exit_code in rows}
    assert listed == {(error.code, error.__name__, error.exit_code) for error in all_errors()}
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert codes >= {error.exit_code for error in all_errors()}


def test_the_page_on_metrics_has_every_metric() -> None:
    page = (REFERENCE / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `(swarm_\w+)` \| (?:counter|gauge|histogram) \|", page, re.MULTILINE))
    idle = Load(kv_free=0, kv_total=0, sessions=0, queue=0, state="serving", layer_time_s=None, prefill_time_s=None)
    scraped = (PeerMetrics(lambda: idle, lambda: 0).page() + GatewayMetrics().page()).decode()
    served = {name for name in re.findall(r"^# HELP (swarm_\w+) ", scraped, re.MULTILINE) if "_created" not in name}
    state = {f"swarm_gateway_{name}" for name in ("running", "waiting", "ready")}  # only of a gateway with models
    assert listed == served | state


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("notices.md", (PeerRecord, PeerLoad)),
        ("package-format.md", (Manifest, LayerSpec, StaticSpec)),
        ("configuration.md", (ClientConfig, GenerationConfig)),
    ],
)
def test_a_page_has_every_field(name: str, kinds: tuple[type, ...]) -> None:
    page = (REFERENCE / name).read_text()
    assert [entry.name for kind in kinds for entry in fields(kind) if f"`{entry.name}`" not in page] == []
