"""`swarm export`: writes a model package from a checkpoint, a GGUF file or an OpenVINO IR."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from export.progress import progress_bars
from export.request import GROUP, Request
from swarm.errors import ConfigError
from swarm.model.manifest import Manifest
from swarm.model.spans import LayerRange

Weights = Literal["keep", "int8", "int4", "f16"]


def register(app: typer.Typer) -> None:
    """Add the command `export` to `app`."""
    app.command("export")(export)


def export(
    source: Annotated[
        Path, typer.Argument(help="A GGUF file, a directory with an OpenVINO IR or a checkpoint, or a hub id.")
    ],
    out: Annotated[Path | None, typer.Argument(help="The directory to write the package to.")] = None,
    weights: Annotated[Weights, typer.Option(help="The format of the weights; keep: the source's.")] = "keep",
    group_size: Annotated[int, typer.Option(help="Numbers that share a scale in int4.")] = GROUP,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="int4 without zero points.")] = False,
    layers: Annotated[str | None, typer.Option(help="A:B: only these layers of a checkpoint, beside OUT.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an export of a checkpoint.")] = False,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes for a checkpoint, each with its memory.")] = 1,
    name: Annotated[str | None, typer.Option(help="The model's name in the swarm; default: SOURCE's.")] = None,
    licence: Annotated[str | None, typer.Option(help="The model's licence; default: SOURCE's.")] = None,
    static: Annotated[
        int | None,
        typer.Option(metavar="CONTEXT", help="Also write graphs for NPUs, which attend to this many tokens."),
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(metavar="C", help="How many tokens of a prompt these graphs run at once; usually 64.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="First compare the layers with SOURCE, if an IR.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check the package SOURCE instead of writing one.")] = False,
    against: Annotated[Path | None, typer.Option(help="With --check: the checkpoint to compare with.")] = None,
    no_beam_idx: Annotated[bool, typer.Option("--no-beam-idx", help="Omit the Gather, to measure its use.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a package, or an unfinished one, at OUT.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn a causal language model into a package: a file a layer, so that peers can serve any span of it."""
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if check:
        if out is not None:
            raise ConfigError(f"--check writes nothing: leave {out} out, or name the checkpoint with --against")
        _check(source, against, console, as_json)
        return
    if out is None:
        raise ConfigError("name OUT, the directory to write the package to (or --check, to check the package SOURCE)")
    if against is not None:
        raise ConfigError("--against names the checkpoint that --check compares a package with: add --check")
    request = Request(
        source=source,
        out=out,
        weights=weights,
        group=group_size,
        symmetric=symmetric,
        layers=None if layers is None else LayerRange.parse(layers),
        resume=resume,
        jobs=jobs,
        name=name,
        licence=licence,
        force=force,
        beam_idx=not no_beam_idx,
        static=static,
        chunk=chunk,
    )
    with progress_bars(console) as report:
        done = request.run(verify, report)
    if done.manifest is None:
        if as_json:
            typer.echo(json.dumps({"layers": layers, "partial": f"{out}.partial"}))
            return
        console.print(f"layers {layers} are in {out}.partial: add the other layers there and continue with --resume")
        return
    summary = _Summary.of(done.manifest, out, done.difference)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    else:
        console.print(summary.text(), soft_wrap=True)


def _check(package: Path, against: Path | None, console: Console, as_json: bool) -> None:
    from export.verify.check import PROMPT, check_package  # Imported here: --help must not load OpenVINO.

    with progress_bars(console) as progress:
        report = check_package(package, against, progress)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        for part in report.parts:
            if part.deviation is not None:
                console.print(f"{part.part:10} deviates by {part.deviation:.2g} of what it adds")
        console.print(f"{len(report.parts)} parts are intact, run, and have fused attention: {report.digest[:12]}")
        if (worst := report.worst) is not None:
            console.print(f"worst: {worst.part} {worst.deviation:.2g}, its format allows {report.tolerance:g}")
        console.print("too big to run here" if report.text is None else f"{PROMPT}{report.text}", soft_wrap=True)
        if (choices := report.choices) is not None:
            console.print(f"transformers chooses the same token at {choices.alike} of {choices.places} positions")
    report.require()


@dataclass(frozen=True, kw_only=True)
class _Summary:
    """A written package. `bytes`: its size on disk; `static_context`: that of its graphs for NPUs, if any;
    `max_difference`: of a logit, None if not verified."""

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
