"""A look at a model's swarm: who serves what now, how they are reached, which route a client would take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from client.inspector.report import Inspection, MeasuredLink, inspect_swarm, measure
from swarm.discovery.directory import Directory
from swarm.discovery.download import fetch_manifest
from swarm.discovery.records import PeerRecord
from swarm.discovery.remote_directory import find_model, find_peers
from swarm.errors import DirectoryError, PeerError, RemoteProtocolError, UnknownModel
from swarm.model.manifest import Manifest
from swarm.model.numerics import Numerics
from swarm.routing.plan import Objective, RouteRequest
from swarm.transport.channel import Channel
from swarm.transport.hello import client_hello

_HIDDEN_BYTES = 4  # f32, the default on the wire
_ASSUMED_HIDDEN_SIZE = 4096
_ASKED_FOR_MANIFEST = 3
_OTHERS_FAULT = (DirectoryError, PeerError, RemoteProtocolError)


class SwarmInspector:
    """Everything that one look at a model's swarm takes, and what the first one learned for the next.

    `text` is the model's name or digest where there is no `manifest`.
    """

    def __init__(
        self,
        *,
        text: str,
        manifest: Manifest | None,
        tokens: int,
        kv_tokens: int,
        objective: Objective,
        numerics: Numerics | None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._text = text
        self._tokens = tokens
        self._kv_tokens = kv_tokens
        self._objective = objective
        self._numerics = numerics
        self._wall = wall
        self._hello = client_hello()
        self._manifest = manifest
        self._model = (manifest.name, manifest.digest, len(manifest.layers)) if manifest else None

    async def __call__(self, directory: Directory, say: Callable[[str], None] = lambda _: None) -> Inspection:
        """Raises UnknownModel, MixedModels, and what the directory raises; never for a single peer."""
        say("looking up who serves what")
        if self._model is None:
            found = await find_model(directory, self._text)
            self._model = (found.name, found.digest, found.layers)
        name, digest, layers = self._model
        records = await find_peers(directory, digest, now=self._wall())
        say(f"measuring the way to {len(records)} peers")
        links = await measure(records, self._hello)
        if self._manifest is None:
            say("asking for the manifest")
            self._manifest = await self._ask_manifest(records, links, digest)
        request = RouteRequest(
            layers=layers,
            hidden_bytes=(self._manifest.hidden_size if self._manifest else _ASSUMED_HIDDEN_SIZE) * _HIDDEN_BYTES,
            tokens=self._tokens,
            kv_tokens=min(self._kv_tokens, self._manifest.context_length) if self._manifest else self._kv_tokens,
            objective=self._objective,
            numerics=self._numerics,
        )
        return inspect_swarm(name, digest, records, request, links=links, now=self._wall())

    @property
    def assumed(self) -> str:
        """What the costs rest on that nobody said; empty where there is nothing."""
        if self._manifest is not None:
            return ""
        return f"no peer gave its manifest: transfers are counted for a hidden size of {_ASSUMED_HIDDEN_SIZE}"

    async def _ask_manifest(
        self, records: Sequence[PeerRecord], links: dict[str, MeasuredLink], digest: str
    ) -> Manifest | None:
        """From a peer nearby; None where none of a few gives it."""
        reached = [record for record in records if record.peer_id in links and links[record.peer_id].reachable]
        reached.sort(key=lambda record: links[record.peer_id].rtt_s)
        for record in reached[:_ASKED_FOR_MANIFEST]:
            try:
                channel = await Channel.open(record.places, self._hello)
                try:
                    return await fetch_manifest(channel, digest)
                finally:
                    await channel.close()
            except (*_OTHERS_FAULT, UnknownModel):
                continue  # the next one; `assumed` says so if there is none
        return None
