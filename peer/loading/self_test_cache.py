"""The self-test that a span has passed on this machine: the next start need not compile twice for its own.

The child of `peer.loading.self_test` is there because a plugin can crash on a graph. Where the same graph has been
tested and
loaded by the same software on the same device, the test runs on the engine that is going to serve. What is remembered
is taken away while that is tried and comes back when it has passed: a start that dies on the way is followed by one
with a child, which can say why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from peer.config import JoinConfig
from peer.loading.self_test import SESSION, SelfTest, run_here
from peer.loading.span_files import SpanFiles
from peer.sessions.service import Serving
from swarm.engine.choice import max_tokens_of

_VERSION = "1"


@dataclass(frozen=True)
class SelfTestRecord:
    """What is remembered of one span, in a small file at `path`."""

    path: Path

    @classmethod
    def of(cls, config: JoinConfig, span_files: SpanFiles) -> SelfTestRecord:
        """Named by all that the result depends on. Raises ConfigError where this machine has no such device."""
        from swarm.engine.device import device_identity  # OpenVINO is loaded where it is wanted alone

        hardware = device_identity(config.device)
        choices = (config.engine, config.device, config.precision, str(config.threads))
        key = json.dumps([_VERSION, span_files.manifest.digest, str(span_files.span), *choices, *hardware])
        return cls(config.cache_dir / "tests" / hashlib.sha256(key.encode()).hexdigest()[:32])

    def take(self) -> SelfTest | None:
        """What `put` was given, once. None where there is nothing, or another peer was faster."""
        try:
            text = self.path.read_bytes()
            self.path.unlink()
            return replace(SelfTest(**json.loads(text)), remembered=True)
        except (OSError, ValueError, TypeError):
            return None  # not there, or not whole: there is a child for that

    def put(self, tested: SelfTest) -> None:
        """Where the folder cannot be written nothing is remembered."""
        fresh = self.path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps(asdict(replace(tested, remembered=False))))
            os.replace(fresh, self.path)


def test_loaded(serving: Serving, tested: SelfTest) -> SelfTest:
    """Run the self-test on the engine that is going to serve. Raises EngineError where its numbers are not right."""
    engine, manifest = serving.engine, serving.manifest
    room = min(max_tokens_of(tested.engine, manifest), serving.limits.kv_total)
    try:
        fresh = run_here(engine, manifest, room=room)
    finally:
        engine.close(SESSION)
    return replace(fresh, engine=tested.engine, instead=tested.instead)
