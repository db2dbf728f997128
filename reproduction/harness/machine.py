"""The machine on which an experiment runs."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """Processor, cores, memory, system and versions; no host name."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "openvino": version("openvino"),
        "openvino_genai": version("openvino-genai"),
        "hivemind": version("hivemind"),
    }


def _processor() -> str:
    """Brand, model and vector extensions: the brand of a virtual machine is not specific."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    extras = [flag for flag in ("avx2", "avx512f", "amx_int8") if flag in fields.get("flags", "").split()]
    return f"{fields.get('model name', '?')} (model {fields.get('model', '?')}; {' '.join(extras)})"
