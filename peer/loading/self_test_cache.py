"""Remembers on disk that a span passed its self-test, so that the next start does not compile the span twice.

The self-test runs in a child process because a plugin can crash on a graph. If the same software has tested and loaded
the same graph on the same device before, the test runs on the engine that is going to serve instead. The record is
removed while that test runs and written again after it passed: a start that crashes is followed by one with a child
process, which reports the reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from peer.config import JoinConfig
from peer.loading.self_test import SESSION, SelfTest, run_self_test
from peer.loading.span_files import SpanFiles
from peer.sessions.service import ServedSpan
from swarm.engine.choice import max_tokens_of

_VERSION = "1"


@dataclass(frozen=True)
class SelfTestRecord:
    """The remembered self-test of one span, as JSON in the file `path`."""

    path: Path

    @classmethod
    def of(cls, config: JoinConfig, span_files: SpanFiles) -> SelfTestRecord:
        """The record of a span; its file name is a hash of all that the result depends on.

        Raises ConfigError if this machine does not have the device.
        """
        from swarm.engine.device import device_identity  # Imported late: it loads OpenVINO.

        hardware = device_identity(config.device)
        choices = (config.engine, config.device, config.precision, str(config.threads))
        key = json.dumps([_VERSION, span_files.manifest.digest, str(span_files.span), *choices, *hardware])
        return cls(config.cache_dir / "tests" / hashlib.sha256(key.encode()).hexdigest()[:32])

    def take(self) -> SelfTest | None:
        """Remove the record and return it. None if there is none, or another peer took it first."""
        try:
            text = self.path.read_bytes()
            self.path.unlink()
            return replace(SelfTest(**json.loads(text)), remembered=True)
        except (OSError, ValueError, TypeError):
            return None  # Missing or damaged: the child process tests the span.

    def put(self, tested: SelfTest) -> None:
        """Write the record. Does nothing if the folder cannot be written."""
        temporary = self.path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(replace(tested, remembered=False))))
            os.replace(temporary, self.path)


def self_test_loaded(serving: ServedSpan, tested: SelfTest) -> SelfTest:
    """Run the self-test on the engine that is going to serve. Raises EngineError if its results are wrong."""
    engine, manifest = serving.engine, serving.manifest
    max_tokens = min(max_tokens_of(tested.engine, manifest), serving.limits.kv_total)
    try:
        result = run_self_test(engine, manifest, max_tokens=max_tokens)
    finally:
        engine.close(SESSION)
    return replace(result, engine=tested.engine, fallback_reason=tested.fallback_reason)
