"""Nobody hears that OpenVINO was imported."""

from __future__ import annotations

import subprocess
import sys


def test_openvino_finds_nothing_to_report_with() -> None:
    script = (
        "import sys; from swarm.process import telemetry; telemetry.switch_off(); import openvino; "
        "print(sys.modules['openvino_telemetry'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None"
