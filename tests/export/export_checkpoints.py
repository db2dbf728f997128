"""Exports tiny checkpoints: `python -m tests.export.export_checkpoints CHECKPOINTS OUT [WEIGHTS [FAMILY ...]]`.

A process of its own, so that torch and transformers stay out of the one that tests. Prints, as JSON, what a family was
refused for: {family: message}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from export.package import export_package
from swarm.errors import UnsupportedModel


def main(checkpoints: Path, out: Path, weights: str = "keep", *families: str) -> None:
    refused: dict[str, str] = {}
    for family in families or sorted(path.name for path in checkpoints.iterdir()):
        try:
            export_package(checkpoints / family, out / family, weights=weights)
        except UnsupportedModel as error:
            refused[family] = str(error)
    print(json.dumps(refused))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
