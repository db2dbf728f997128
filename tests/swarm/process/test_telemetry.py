"""OpenVINO's telemetry is switched off."""

from __future__ import annotations

import subprocess
import sys


def test_openvino_does_not_find_its_telemetry_package() -> None:
    script = (
        "import sys; from swarm.process import telemetry; telemetry.switch_off(); import openvino; "
        "print(sys.modules['openvino_telemetry'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
