"""Makes tiny checkpoints and exports them: `python -m tests.export.export_checkpoints DIRECTORY`.

::

    DIRECTORY/checkpoints/FAMILY/   as `tests.export.make_checkpoints` makes it
    DIRECTORY/packages/FAMILY/      its package in f32
    DIRECTORY/refused.json          {family: why it was refused}

One process of its own for all: torch and transformers stay out of the one that tests, and are loaded once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from export.package.from_graph import export_package
from swarm.errors import UnsupportedModel
from tests.export import make_checkpoints


def main(directory: Path) -> None:
    checkpoints, packages = directory / "checkpoints", directory / "packages"
    make_checkpoints.main(checkpoints)
    packages.mkdir()
    refused: dict[str, str] = {}
    for checkpoint in sorted(checkpoints.iterdir()):
        try:
            export_package(checkpoint, packages / checkpoint.name)
        except UnsupportedModel as error:
            refused[checkpoint.name] = str(error)
    (directory / "refused.json").write_text(json.dumps(refused))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
