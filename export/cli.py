"""`swarm export`: a GGUF file or an OpenVINO IR becomes a model package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from export.source import Progress as Report
from swarm.manifest import Manifest

Weights = Literal["keep", "int8", "int4", "f16"]


def register(app: typer.Typer) -> None:
    """Add the command `export` to `app`."""
    app.command("export")(export)


def export(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a directory with openvino_model.xml.")],
    out: Annotated[Path, typer.Argument(help="The directory to write the package to.")],
    weights: Annotated[Weights, typer.Option(help="Their format; keep takes the source's.")] = "keep",
    name: Annotated[str | None, typer.Option(help="Its name in the swarm; otherwise that of SOURCE.")] = None,
    licence: Annotated[str | None, typer.Option(help="Its licence; otherwise what SOURCE says.")] = None,
    static: Annotated[
        int | None,
        typer.Option(metavar="CONTEXT", help="Also write graphs for NPUs, which attend to so many tokens."),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="C", help="How many tokens of a prompt those take at a time; usually 64.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="First run the layers against SOURCE.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a package that is at OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn a causal language model into a package: a file a layer, so that peers can serve any span of it."""
    from export.package import export_package  # OpenVINO is not loaded for --help
    from export.static import static_spec
    from export.verify import require_exact, verify_package

    differences: list[float] = []
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    with _bars(console) as report:

        def check(package: Path, ir: Path) -> None:
            run = require_exact if weights == "keep" else verify_package
            differences.append(run(package, ir, progress=report))

        manifest = export_package(
            source,
            out,
            weights=weights,
            name=name,
            licence=licence,
            force=force,
            static=None if static is None else static_spec(static, chunk),
            check=check if verify else None,
            progress=report,
        )
    summary = _Summary.of(manifest, out, differences[0] if differences else None)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    else:
        console.print(summary.text(), soft_wrap=True)


@dataclass(frozen=True, kw_only=True)
class _Summary:
    """What was written. `bytes` on disk; `static_context` of the graphs for NPUs, None without; `max_difference`
    of a logit, None if it was not verified."""

    package: str
    name: str
    digest: str
    licence: str
    weights: str
    layers: int
    bytes: int
    static_context: int | None
    max_difference: float | None

    @classmethod
    def of(cls, manifest: Manifest, out: Path, difference: float | None) -> _Summary:
        return cls(
            package=str(out),
            name=manifest.name,
            digest=manifest.digest,
            licence=manifest.licence,
            weights=manifest.weights,
            layers=len(manifest.layers),
            bytes=sum(entry.size for entry in manifest.files(manifest.parts)),
            static_context=manifest.static.context if manifest.static else None,
            max_difference=difference,
        )

    def text(self) -> str:
        lines = [
            f"{self.name}: {self.layers} layers, {self.weights} weights, {self.bytes / 1e6:.0f} MB, "
            f"licence {self.licence}",
            f"digest {self.digest}",
            f"written to {self.package}",
        ]
        if self.static_context is not None:
            lines.append(f"with static graphs for NPUs, which attend to {self.static_context} tokens")
        if self.max_difference == 0.0:
            lines.append("verified: equal to the source to the bit")
        elif self.max_difference is not None:
            lines.append(f"verified: logits differ from the source's by up to {self.max_difference:.3g}")
        return "\n".join(lines)


@contextmanager
def _bars(console: Console) -> Iterator[Report]:
    """One bar for each thing that is reported; nothing at all, not even an empty line, where nothing is."""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console)
    with ExitStack() as stack:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if not tasks:
                stack.enter_context(progress)
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=None)
            progress.update(tasks[what], completed=done, total=total or None)

        yield report
