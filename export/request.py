"""A request to `swarm export`, and the choice of the exporter for its source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from export.sources.source import Progress
from swarm.errors import ConfigError
from swarm.model.manifest import Manifest, StaticSpec
from swarm.model.spans import LayerRange

if TYPE_CHECKING:
    from export.package.from_checkpoint import CheckpointExport
    from export.package.journal import Journal

GROUP = 128


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """`manifest` is None if only some layers were exported; `difference`: of a logit, if verified."""

    manifest: Manifest | None
    difference: float | None = None


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of the command. `layers`, `resume` and `jobs` are for checkpoints only."""

    source: Path
    out: Path
    weights: str = "keep"
    group: int = GROUP
    symmetric: bool = False
    layers: LayerRange | None = None
    resume: bool = False
    jobs: int = 1
    name: str | None = None
    licence: str | None = None
    force: bool = False
    beam_idx: bool = True
    static: int | None = None
    chunk: int | None = None

    def run(self, verify: bool, progress: Progress) -> ExportResult:
        """Raises what `export.package.from_graph.export_package` and
        `export.package.from_checkpoint.export_checkpoint` raise."""
        from export.checkpoint.checkpoint import fetch_checkpoint, is_checkpoint  # Lazily, as all here, for --help.

        directory, origin = self.source, None
        if not self.source.exists() and _is_hub_id(self.source):
            progress(f"fetching {self.source}", 0, 0)
            directory, origin = fetch_checkpoint(str(self.source)), str(self.source)
        if directory.is_dir() and is_checkpoint(directory) and not (directory / "openvino_model.xml").is_file():
            return ExportResult(manifest=self._from_checkpoint(directory, origin, verify, progress))
        if self.layers is not None or self.resume or self.jobs > 1:
            raise ConfigError(f"--layers, --resume and --jobs are for checkpoints, which {self.source} is not")
        return self._from_graph(verify, progress)

    def _from_checkpoint(
        self, directory: Path, origin: str | None, verify: bool, progress: Progress
    ) -> Manifest | None:
        from export.graph.compress import Format
        from export.package.from_checkpoint import export_checkpoint

        if verify:
            raise ConfigError(
                "--verify is for graphs; a checkpoint is compared with "
                "`swarm export --check PACKAGE --against CHECKPOINT`"
            )
        return export_checkpoint(
            directory,
            self.out,
            Format(weights=self.weights, group=self.group, symmetric=self.symmetric),
            name=self.name,
            licence=self.licence,
            origin=origin,
            layers=self.layers,
            resume=self.resume,
            force=self.force,
            static=self._static(),
            beam_idx=self.beam_idx,
            make=self._make_in_jobs if self.jobs > 1 else None,
            progress=progress,
        )

    def _from_graph(self, verify: bool, progress: Progress) -> ExportResult:
        from export.package.from_graph import export_package
        from export.verify.against_graph import require_exact, verify_package

        differences: list[float] = []

        def check(package: Path, ir: Path) -> None:
            run = require_exact if self.weights == "keep" else verify_package
            differences.append(run(package, ir, progress=progress))

        manifest = export_package(
            self.source,
            self.out,
            weights=self.weights,
            group=self.group,
            symmetric=self.symmetric,
            beam_idx=self.beam_idx,
            name=self.name,
            licence=self.licence,
            force=self.force,
            static=self._static(),
            check=check if verify else None,
            progress=progress,
        )
        return ExportResult(manifest=manifest, difference=differences[0] if differences else None)

    def _static(self) -> StaticSpec | None:
        from export.graph.static import static_spec

        return None if self.static is None else static_spec(self.static, self.chunk)

    def _make_in_jobs(self, work: CheckpointExport, journal: Journal, parts: Sequence[str], progress: Progress) -> None:
        from export.package.jobs import even_shares, run_jobs

        command = ["export", str(self.source), str(self.out), "--weights", self.weights, "--resume", "--force"]
        command += ["--group-size", str(self.group), *(["--symmetric"] if self.symmetric else [])]
        command += [] if self.beam_idx else ["--no-beam-idx"]
        span = self.layers or LayerRange(0, work.layers)
        run_jobs(command, even_shares(span, self.jobs), journal, len(parts), progress)


def _is_hub_id(path: Path) -> bool:
    return len(path.parts) == 2 and not path.is_absolute() and path.parts[0] not in (".", "..", "~")
