"""`python -m reproduction` lists the experiments; `python -m reproduction NAME [--json FILE]` runs one."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from rich.console import Console

from reproduction.experiment import Report
from swarm.errors import SwarmError

# folder -> name -> what it compares. The module reproduction.FOLDER.NAME has `run(log) -> Report`.
EXPERIMENTS = {
    "engine": {
        "shard_parity": "the whole model as one composed span, with and without beam_idx, against openvino_genai",
        "shard_stages": "1, 2, 3 and 4 spans chained in one process against the unsplit graph",
        "memory": "resident memory of a peer against the size of its span",
        "trim_cost": "rewinding by mask against trimming the state, by cache length",
        "beam_idx": "speed by context length with and without the beam_idx Gather",
        "precision": "accuracy against performance mode: speed, and how often greedy text differs",
    },
    "network": {
        "hop_overhead": "one stream over two real peers against the same two graphs chained in one process",
        "breakdown": "the time of a token by hop and part",
        "logits": "answers with top-1, top-n, f16 and f32 logits, with and without delay",
        "activation_format": "hidden states in f32, f16, bf16 and int8 between hops",
        "wan": "one token per trip against drafts and windows in flight, two distant peers, two users",
    },
    "speculation": {
        "speculation": "eight kinds of prompts with and without drafts, one process, SmolLM2 and a 1B-shaped model",
        "speculation_length": "drafts over 128 to 2,048 tokens, and the cache slots that their rewinds waste",
        "draft_parity": "greedy texts with drafts against those without, 256 tokens, 2 to 4 peers",
        "coupling": "acceptance of a sampling draft: the same random numbers against the optimum",
        "k_sweep": "guesses per trip, fixed and adaptive, over three peers with one-way delays of 0, 50 and 100 ms",
    },
    "serving": {
        "startup": "cold and warm join to announced; generate from process start to first token",
        "gateway_overhead": "1 and 16 streams through the gateway against the Python client directly",
        "gateway_load": "1 ... 64 streams through one gateway: total speed and token latencies",
        "micro_batching": "1, 2 and 3 streams that interleave over two peers, one step at a time",
        "progression": "two peers with one stream, two, and two with drafts, against one unsplit user on one core",
        "three_stages": "three peers and three users, stateful and paged",
        "prefill": "a prompt of 2,000 tokens over two peers against the unsplit model on one core",
        "interference": "gaps between the tokens of a text while prompts of 2,000 tokens arrive",
        "prefix": "time to first token with a prefix of 1,000 tokens cached and not cached",
        "soak": "ten minutes of 32 changing users while peers are killed: no wrong token, no leak",
        "batching": "1 to 32 users on two peers against the unsplit model on one core, for one user and for all",
    },
    "export": {
        "export_memory": "peak memory of an export by number of layers, and on a checkpoint of 12 GB",
        "export_speed": "seconds per layer of an export against nncf's own time",
        "weights": "SmolLM2 in each weight format: size, speed, perplexity",
    },
}
FOLDERS = {name: folder for folder, experiments in EXPERIMENTS.items() for name in experiments}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduction", description=__doc__)
    parser.add_argument("experiment", nargs="?", choices=[*FOLDERS], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="append its tables to this file")
    options = parser.parse_args()
    console, progress = Console(), Console(stderr=True)
    if options.experiment is None:
        for folder, experiments in EXPERIMENTS.items():
            console.print(folder, style="bold")
            for name, text in experiments.items():
                console.print(f"  {name:18} {text}", highlight=False)
        return 0
    try:
        report: Report = import_module(f"reproduction.{FOLDERS[options.experiment]}.{options.experiment}").run(
            lambda text: progress.print(text, style="dim", highlight=False)
        )
    except SwarmError as error:
        progress.print(f"error: {error}", style="red", highlight=False)
        return error.exit_code
    report.show(console)
    if options.json is not None:
        options.json.write_text(report.to_json() + "\n")
    if options.markdown is not None:
        with options.markdown.open("a") as file:
            file.write(report.to_markdown() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
