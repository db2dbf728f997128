"""Inspects a model's swarm: looks up its peers, measures the links to them, and plans a route."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from client.inspector.report import Inspection, MeasuredLink, inspect_swarm, measure_links
from swarm.discovery.directory import Directory
from swarm.discovery.download import fetch_manifest
from swarm.discovery.peer_directory import find_model, find_peers
from swarm.discovery.records import PeerRecord
from swarm.errors import DirectoryError, PeerError, RemoteProtocolError, UnknownModel
from swarm.model.manifest import Manifest
from swarm.model.numerics import Numerics
from swarm.routing.plan import Objective, RouteRequest
from swarm.transport.channel import Channel
from swarm.transport.hello import client_hello

_HIDDEN_BYTES = 4  # f32, the default on the wire
_ASSUMED_HIDDEN_SIZE = 4096
_MANIFEST_ATTEMPTS = 3
_REMOTE_ERRORS = (DirectoryError, PeerError, RemoteProtocolError)


class SwarmInspector:
    """Inspects one model's swarm repeatedly; keeps the model's digest and manifest once they are known.

    `model` is a name or a digest. It is not looked up where `manifest` is given.
    """

    def __init__(
        self,
        *,
        model: str,
        manifest: Manifest | None,
        tokens: int,
        kv_tokens: int,
        objective: Objective,
        numerics: Numerics | None,
    ) -> None:
        self._query = model
        self._tokens = tokens
        self._kv_tokens = kv_tokens
        self._objective = objective
        self._numerics = numerics
        self._hello = client_hello()
        self._manifest = manifest
        self._identity = (manifest.name, manifest.digest, len(manifest.layers)) if manifest else None

    async def inspect(self, directory: Directory, on_progress: Callable[[str], None] = lambda _: None) -> Inspection:
        """Raises UnknownModel, MixedModels, and what the directory raises; a failing peer raises nothing."""
        on_progress("looking up peers and their layers")
        if self._identity is None:
            found = await find_model(directory, self._query)
            self._identity = (found.name, found.digest, found.layers)
        name, digest, layers = self._identity
        records = await find_peers(directory, digest, now=time.time())
        on_progress(f"measuring the links to {len(records)} peers")
        links = await measure_links(records, self._hello)
        if self._manifest is None:
            on_progress("asking for the manifest")
            self._manifest = await self._fetch_manifest(records, links, digest)
        request = RouteRequest(
            layers=layers,
            hidden_bytes=(self._manifest.hidden_size if self._manifest else _ASSUMED_HIDDEN_SIZE) * _HIDDEN_BYTES,
            tokens=self._tokens,
            kv_tokens=min(self._kv_tokens, self._manifest.context_length) if self._manifest else self._kv_tokens,
            objective=self._objective,
            numerics=self._numerics,
        )
        return inspect_swarm(name, digest, records, request, links=links, now=time.time())

    @property
    def assumption(self) -> str:
        """What the costs assume because no peer reported it; empty where nothing is assumed."""
        if self._manifest is not None:
            return ""
        return f"no peer sent the manifest: the cost of transfers assumes a hidden size of {_ASSUMED_HIDDEN_SIZE}"

    async def _fetch_manifest(
        self, records: Sequence[PeerRecord], links: dict[str, MeasuredLink], digest: str
    ) -> Manifest | None:
        """Ask the nearest peers in turn. Returns None where all attempts fail."""
        reachable = [record for record in records if record.peer_id in links and links[record.peer_id].reachable]
        reachable.sort(key=lambda record: links[record.peer_id].rtt_s)
        for record in reachable[:_MANIFEST_ATTEMPTS]:
            try:
                channel = await Channel.open(record.pinned_addresses, self._hello)
                try:
                    return await fetch_manifest(channel, digest)
                finally:
                    await channel.close()
            except (*_REMOTE_ERRORS, UnknownModel):
                continue
        return None
