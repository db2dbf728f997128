"""Switches off OpenVINO's telemetry: its Python package reports each import to Intel unless this prevents it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast


def switch_off() -> None:
    """Switch telemetry off for this process. Call it before OpenVINO is imported, which then uses its own no-op stub.

    The report is sent by a thread and a child process, which a Ctrl-C in the first half second would interrupt.
    """
    sys.modules.setdefault("openvino_telemetry", cast(ModuleType, None))
