"""The records that a peer announces: its own, and that of its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peer.loading.self_test import SelfTest
from peer.loading.span_files import shared_layers
from peer.serving.queries import SharedFiles
from peer.sessions.service import Load, ServedSpan
from swarm.discovery.records import ModelRecord, PeerRecord
from swarm.model.manifest import Manifest, layer_part
from swarm.model.numerics import Numerics
from swarm.model.spans import LayerRange
from swarm.transport.hello import SOFTWARE


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """The part of a peer's record that does not change while it runs.

    The times come from the self-test; they count until steps of sessions have been measured.
    """

    manifest: Manifest
    span: LayerRange
    entries: tuple[int, ...]
    holds: tuple[LayerRange, ...]
    numerics: Numerics
    device: str
    peer_id: str
    incarnation: int
    layer_time_s: float
    prefill_time_s: float
    attends_to: int = 0

    @classmethod
    def of(
        cls,
        serving: ServedSpan,
        shared_files: SharedFiles,
        tested: SelfTest,
        *,
        peer_id: str,
        incarnation: int,
        device: str,
    ) -> Announcement:
        return cls(
            manifest=serving.manifest,
            span=serving.engine.span,
            entries=serving.entries if serving.builder is not None else (),
            holds=shared_layers(shared_files),
            numerics=serving.engine.numerics,
            device=device,
            peer_id=peer_id,
            incarnation=incarnation,
            layer_time_s=tested.layer_time_s,
            prefill_time_s=tested.prefill_time_s,
            attends_to=serving.attends_to,
        )

    def record(self, load: Load, *, name: str, addresses: Sequence[str]) -> PeerRecord:
        """The record as of now, without times and links: the announcer adds them."""
        return PeerRecord(
            model=self.manifest.digest,
            peer_id=self.peer_id,
            name=name,
            incarnation=self.incarnation,
            span=self.span,
            entries=self.entries,
            holds=self.holds,
            addresses=tuple(addresses),
            device=self.device,
            numerics=self.numerics,
            layer_time_s=self.layer_time_s if load.layer_time_s is None else load.layer_time_s,
            prefill_time_s=self.prefill_time_s if load.prefill_time_s is None else load.prefill_time_s,
            kv_free=load.kv_free,
            kv_total=load.kv_total,
            sessions=load.sessions,
            queue=load.queue,
            state=load.state,
            work=load.work,
            software=SOFTWARE,
            announced_at=0.0,
            expires_at=0.0,
            attends_to=self.attends_to,
        )

    def model(self) -> ModelRecord:
        manifest = self.manifest
        layers = len(manifest.layers)
        parts = [layer_part(layer) for layer in manifest.span]
        return ModelRecord(
            digest=manifest.digest,
            name=manifest.name,
            source=manifest.source,
            licence=manifest.licence,
            weights=manifest.weights,
            layers=layers,
            layer_bytes=sum(entry.size for entry in manifest.files(parts)) // layers,
            kv_layer_elements=manifest.kv_elements(manifest.span) // layers,
            expires_at=0.0,
        )
