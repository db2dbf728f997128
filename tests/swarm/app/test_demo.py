"""`swarm demo` generates the unsplit model's text, and leaves no process or file after an interrupt."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from client.options import stderr_console
from swarm import __version__
from swarm.app.demo import GRID, PROMPT, _log_folder, prepare_package, show_prompt
from swarm.app.demo_model import SHA256
from swarm.model.manifest import load_manifest
from tests.conftest import ChatIds, GreedyReference
from tests.export.package.test_from_graph import contents
from tests.harness import MAX_WAIT_S, ROOT, listening_ports, run_swarm, still_running, swarm_command, wait_until

TOKENS = 32


def test_with_an_empty_cache_the_text_is_that_of_the_unsplit_model(
    smollm2_gguf: Path,
    smollm2_package: Path,
    smollm2_tokenizer: Any,
    chat_ids: ChatIds,
    greedy_reference: GreedyReference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The demo also exports the model: equal byte for byte to the package of the other tests."""
    monkeypatch.setenv("SWARM_DEMO_MODEL", str(smollm2_gguf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = run_swarm("demo", "--json", "--max-new-tokens", str(TOKENS), timeout=2 * MAX_WAIT_S)
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    expected = greedy_reference(chat_ids(PROMPT), TOKENS)
    assert not set(expected) & set(load_manifest(smollm2_package).eos_token_ids), "choose a prompt with a longer answer"
    assert output["token_ids"] == expected
    assert output["text"] == smollm2_tokenizer.decode(expected)
    assert output["ttft_s"] > 0
    assert output["tokens_per_second"] > 0
    hops = output["hops"]
    assert [hop["layers"] for hop in hops] == ["0:11", "11:26", "26:30"]
    parts = ("network_s", "queue_s", "compute_s", "codec_s", "other_s")
    total = sum(hop[part] for hop in hops for part in parts) + output["return_s"] + output["client_s"]
    assert total == pytest.approx(output["token_s"], rel=0.05)
    (exported,) = tmp_path.glob("*/demo/*/manifest.json")
    assert contents(exported.parent) == contents(smollm2_package)


def test_more_peers_than_the_grid_allows_are_refused(smollm2_gguf: Path) -> None:
    done = run_swarm("demo", "--peers", "9")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("error: 9 peers")  # Before anything is downloaded.


@pytest.mark.parametrize(("error", "kept"), [(ValueError, True), (BrokenPipeError, False), (KeyboardInterrupt, False)])
def test_logs_are_kept_after_an_error(error: type[BaseException], kept: bool) -> None:
    with pytest.raises(error), _log_folder() as folder:
        raise error
    assert folder.exists() == kept
    shutil.rmtree(folder, ignore_errors=True)


def test_a_package_in_a_read_only_cache_is_used(
    smollm2_gguf: Path, smollm2_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_DEMO_MODEL", str(smollm2_gguf))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cached = add_to_cache(tmp_path, smollm2_gguf, smollm2_package)

    def refuse(_: Path) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("swarm.app.demo.locked", refuse)
    assert prepare_package(stderr_console()) == cached


def add_to_cache(cache: Path, gguf: Path, package: Path) -> Path:
    """Put `package` where a demo with this cache looks for it."""
    cached = cache / "aipc-swarm" / "demo" / f"{gguf.stem}-{SHA256[:12]}-{__version__}"
    cached.parent.mkdir(parents=True)
    cached.symlink_to(package)
    return cached


def test_the_demos_grid_is_the_models(smollm2_package: Path) -> None:
    assert load_manifest(smollm2_package).grid == GRID


def test_a_prompt_is_not_parsed_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    show_prompt(stderr_console(), "what does [/b] mean? :smile:")
    assert "what does [/b] mean? :smile:" in capsys.readouterr().err


class Run:
    """A demo as a terminal runs it: Ctrl-C goes to its whole process group."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.output = folder / "stdout"
        self.errors = folder / "stderr"
        environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            self.process = subprocess.Popen(
                swarm_command("demo", "--max-new-tokens", "400", "--peers", "2"),
                cwd=ROOT,
                env=environment | {"TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        return found

    @property
    def commands(self) -> Iterator[str]:
        for child in self.children:
            with suppress(psutil.Error):  # It may have just ended.
                yield " ".join(child.cmdline())

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)


@contextmanager
def running(folder: Path, cache: Path) -> Iterator[Run]:
    run = Run(folder, cache)
    try:
        yield run
    finally:
        run.process.kill()
        run.process.wait()


def converts(run: Run) -> bool:
    return any("LLMPipeline" in command for command in run.commands)


def starts_peers(run: Run) -> bool:
    return any("swarm.app.parent_watch" in command for command in run.commands)


def answers(run: Run) -> bool:
    return run.output.stat().st_size > 10


@pytest.mark.parametrize("moment", [converts, starts_peers, answers])
def test_an_interrupt_leaves_no_process_and_no_port(
    moment: Callable[[Run], bool],
    smollm2_gguf: Path,
    smollm2_package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SWARM_DEMO_MODEL", str(smollm2_gguf))
    cache = tmp_path / "cache"
    if moment is not converts:
        add_to_cache(cache, smollm2_gguf, smollm2_package)
    with running(tmp_path, cache) as run:
        wait_until(lambda: moment(run) or run.process.poll() is not None, moment.__name__)
        family = run.children
        ports = listening_ports(family)
        assert family, run.errors.read_text()
        run.interrupt()
        assert run.process.wait(timeout=MAX_WAIT_S) == 130, run.errors.read_text()
        assert still_running(family) == []
        assert listening_ports(family) == set()
        assert (len(ports) >= 4) == (moment is answers)  # Two peers, each with a DHT node.
        assert "Traceback" not in run.errors.read_text()
        assert list(tmp_path.glob("swarm-demo-*")) == []
