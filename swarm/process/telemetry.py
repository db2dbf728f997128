"""No reports to anybody: OpenVINO's Python package tells its maker of each import unless that is prevented."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast


def switch_off() -> None:
    """For this process, if OpenVINO is not imported yet; OpenVINO then uses its own stand-in that does nothing.

    The report goes out from a thread and a child process, which a Ctrl-C in the first half second would hit.
    """
    sys.modules.setdefault("openvino_telemetry", cast(ModuleType, None))
