from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import DamagedFile, PackageError
from swarm.model.manifest import (
    EMBED,
    HEAD,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    TOKENIZER,
    FileEntry,
    LayerSpec,
    Manifest,
    StaticSpec,
    check_files,
    describe_file,
    even_grid,
    layer_part,
    load_manifest,
    package_folder,
    sha256_of,
    static_part,
)
from swarm.model.spans import LayerRange

LAYERS = 4


def entry(path: str, size: int = 10) -> FileEntry:
    return FileEntry(path=path, size=size, sha256=hashlib.sha256(path.encode()).hexdigest())


def a_manifest(**values: Any) -> Manifest:
    parts: dict[str, tuple[FileEntry, ...]] = {
        name: (entry(f"{name}.xml"), entry(f"{name}.bin", 100)) for name in map(layer_part, range(LAYERS))
    }
    parts |= {EMBED: (entry("embed.bin", 1000),), HEAD: (entry("head.bin", 2000),), TOKENIZER: (entry("tok.bin"),)}
    fields: dict[str, Any] = {
        "name": "tiny",
        "architecture": "llama",
        "source": "file.gguf",
        "licence": "Apache-2.0",
        "weights": "f16",
        "hidden_size": 64,
        "vocab_size": 256,
        "context_length": 512,
        "eos_token_ids": (2,),
        "layers": tuple(LayerSpec(kv_heads=2, key_size=8, value_size=8) for _ in range(LAYERS)),
        "grid": even_grid(LAYERS),
        "parts": parts,
    }
    return Manifest(**(fields | values))


def changed(**values: Any) -> bytes:
    return json.dumps(json.loads(a_manifest().to_json()) | values).encode()


def test_a_manifest_survives_a_round_trip_with_its_digest() -> None:
    manifest = a_manifest()
    read_again = Manifest.from_json(manifest.to_json())
    assert read_again == manifest
    assert read_again.to_json() == manifest.to_json()
    assert read_again.digest == manifest.digest == hashlib.sha256(manifest.to_json()).hexdigest()


def test_each_difference_changes_the_digest() -> None:
    different = [a_manifest(), a_manifest(name="else"), a_manifest(weights="int4"), a_manifest(eos_token_ids=(2, 3))]
    assert len({manifest.digest for manifest in different}) == len(different)


def test_the_order_of_parts_does_not_change_the_digest() -> None:
    manifest = a_manifest()
    assert a_manifest(parts=dict(reversed(list(manifest.parts.items())))).digest == manifest.digest


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"format": 2}, "format 2; this version reads format 1"),
        ({"format": None}, "format None"),
        ({"layers": []}, "0 layers"),
        ({"layers": [{"kv_heads": 2, "key_size": 8, "value_size": 8}] * 5000}, "5000 layers"),
        ({"layers": [{"kv_heads": 0, "key_size": 8, "value_size": 8}]}, "kv_heads is 0"),
        ({"layers": [{"kv_heads": 2, "key_size": 8, "value_size": 8, "window": -1}]}, "window is -1"),
        ({"layers": [{"kv_heads": 2}]}, "cannot be read"),
        ({"layers": 7}, "cannot be read"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"vocab_size": 1 << 40}, "vocab_size is"),
        ({"context_length": 1.5}, "context_length is 1.5"),
        ({"eos_token_ids": [float("inf")]}, "cannot be read"),
        ({"eos_token_ids": ["x"]}, "cannot be read"),
        ({"grid": []}, "grid"),
        ({"grid": [0, 2]}, "does not ascend from 0 to 4"),
        ({"grid": [0, 3, 2, 4]}, "does not ascend"),
        ({"grid": [0, 2, 2, 4]}, "does not ascend"),
        ({"grid": [float("inf")]}, "cannot be read"),
        ({"name": 5}, "name is 5"),
        ({"name": "\x1b[2J"}, "name is"),
        ({"name": "x" * 300}, "name is"),
        ({"source": ["a"]}, "source is"),
        ({"parts": {}}, "lacks the parts embed, head, layer_000, layer_001, layer_002, layer_003, tokenizer"),
        ({"parts": {"embed": [{"path": "a"}]}}, "cannot be read"),
        ({"parts": []}, "cannot be read"),
    ],
)
def test_the_error_names_the_invalid_value_of_a_manifest(values: dict[str, Any], named: str) -> None:
    with pytest.raises(PackageError) as caught:
        Manifest.from_json(changed(**values))
    assert named in str(caught.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"5", b'"text"', b"\xff", b"[" * 100_000, b"{}", b"9" * 5000])
def test_bytes_that_are_not_a_manifest_are_refused(raw: bytes) -> None:
    with pytest.raises(PackageError):
        Manifest.from_json(raw)


def test_a_manifest_over_the_size_limit_is_refused() -> None:
    with pytest.raises(PackageError, match="over the limit"):
        Manifest.from_json(bytes(MAX_MANIFEST_BYTES + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.sampled_from(sorted(json.loads(a_manifest().to_json()))), json_values)
def test_any_value_in_any_field_gives_a_manifest_or_an_error(name: str, value: Any) -> None:
    try:
        manifest = Manifest.from_json(changed(**{name: value}))
    except PackageError:
        return
    assert Manifest.from_json(manifest.to_json()).digest == manifest.digest


@pytest.mark.parametrize("path", ["", ".", "..", "/", "/etc/passwd", "../up", "a/b", "a\\b", "manifest.json"])
def test_a_path_that_is_not_a_plain_file_name_is_refused(path: str) -> None:
    with pytest.raises(PackageError, match="is not a plain file name"):
        entry(path)


@pytest.mark.parametrize(
    ("size", "sha256"), [(-1, "0" * 64), (1.5, "0" * 64), (1, "0" * 63), (1, "G" * 64), (1, "A" * 64)]
)
def test_an_invalid_size_or_hash_is_refused(size: Any, sha256: str) -> None:
    with pytest.raises(PackageError):
        FileEntry(path="file.bin", size=size, sha256=sha256)


def test_a_span_at_an_end_includes_the_embedding_or_the_head() -> None:
    manifest = a_manifest()
    assert manifest.span == LayerRange(0, 4)
    assert manifest.span_parts(LayerRange(0, 2)) == ["embed", "layer_000", "layer_001"]
    assert manifest.span_parts(LayerRange(1, 3)) == ["layer_001", "layer_002"]
    assert manifest.span_parts(LayerRange(3, 4)) == ["layer_003", "head"]
    assert manifest.span_bytes(LayerRange(0, 4)) == 1000 + 4 * 110 + 2000
    assert manifest.kv_elements(LayerRange(1, 3)) == 2 * 2 * 16
    with pytest.raises(PackageError, match="layers 3:5 are not in tiny, which has 4"):
        manifest.span_parts(LayerRange(3, 5))


def test_a_file_that_two_parts_share_is_listed_once() -> None:
    shared = entry("shared.bin")
    manifest = a_manifest(parts=dict(a_manifest().parts) | {EMBED: (shared,), HEAD: (shared,)})
    assert manifest.files([EMBED, HEAD]) == [shared]


@given(st.integers(1, 200), st.integers(1, 20))
def test_a_grid_ascends_from_0_to_the_layer_count_in_even_steps(layers: int, spans: int) -> None:
    grid = even_grid(layers, spans)
    assert grid[0] == 0
    assert grid[-1] == layers
    assert len(grid) == min(spans, layers) + 1
    lengths = [b - a for a, b in itertools.pairwise(grid)]
    assert max(lengths) - min(lengths) <= 1


def test_files_that_match_the_manifest_pass_the_check(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"hello")
    described = describe_file(tmp_path / "a.bin")
    assert described == FileEntry(path="a.bin", size=5, sha256=hashlib.sha256(b"hello").hexdigest())
    progress: list[int] = []
    check_files(tmp_path, [described], progress.append)
    assert progress == [5]
    assert sha256_of(tmp_path / "a.bin") == described.sha256


@pytest.mark.parametrize(
    ("content", "reason"), [(b"jello", "is damaged"), (b"hell", "has 4 bytes"), (None, "cannot be read")]
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"hello")
    described = describe_file(path)
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(DamagedFile, match=reason) as caught:
        check_files(tmp_path, [described])
    assert str(path) in str(caught.value)
    assert "fetch or export it again" in str(caught.value)


def test_the_manifest_of_a_package_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="is not a model package"):
        load_manifest(tmp_path)
    (tmp_path / MANIFEST).write_bytes(a_manifest().to_json())
    assert load_manifest(tmp_path) == a_manifest()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", a_manifest().to_json()[:-40]])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(PackageError, match="fetch or export") as caught:
        load_manifest(tmp_path)
    assert str(tmp_path / MANIFEST) in str(caught.value)


def test_a_bare_word_is_a_name_unless_it_is_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert package_folder("smollm2") is None
    assert package_folder("x" * 300) is None
    assert package_folder("") is None
    (tmp_path / "smollm2" / MANIFEST).write_bytes(b"")
    assert package_folder("smollm2") == Path("smollm2")


@pytest.mark.parametrize("path", ["./nowhere", "a/b", ".", Path("nowhere")])
def test_a_path_is_a_path_whether_it_exists_or_not(path: str | Path) -> None:
    assert package_folder(path) == Path(path)


def test_a_tilde_is_expanded() -> None:
    assert package_folder("~/model") == Path.home() / "model"


def with_static(spec: StaticSpec) -> Manifest:
    plain = a_manifest()
    static = {static_part(layer): (entry(f"{static_part(layer)}.xml"),) for layer in plain.span}
    return a_manifest(parts={**plain.parts, **static}, static=spec)


def test_a_manifest_without_static_graphs_omits_them() -> None:
    assert b"static" not in a_manifest().to_json()
    with pytest.raises(PackageError, match=r"tiny .* has no static graphs"):
        a_manifest().static_parts(LayerRange(0, 1))


def test_static_graphs_are_part_of_the_digest() -> None:
    manifest = with_static(StaticSpec(context=64, chunk=8))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.static_parts(LayerRange(1, 3)) == ["static_001", "static_002"]
    others = [a_manifest(), with_static(StaticSpec(context=64, chunk=16)), with_static(StaticSpec(context=32, chunk=8))]
    assert len({m.digest for m in (manifest, *others)}) == 4


def test_a_manifest_with_static_graphs_needs_them_for_all_layers() -> None:
    with pytest.raises(PackageError, match="lacks the parts static_000, static_001"):
        a_manifest(static=StaticSpec(context=64, chunk=8))


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({"context": 1, "chunk": 2}, "context is 1"),
        ({"context": 1 << 40, "chunk": 2}, "context is"),
        ({"context": 64, "chunk": 1}, "chunk is 1"),
        ({"context": 64, "chunk": 61}, "chunk is 61; 2 to 60"),
        ({"context": 64, "chunk": 8, "sinks": 64}, "sinks is 64"),
        ({"context": 64, "chunk": 8, "rewind": -1}, "rewind is -1"),
        ({"context": "64", "chunk": 8}, "context is '64'"),
        ({"context": 64, "chunk": 8.0}, "chunk is 8.0"),
        ({"context": 64, "chunk": 8, "sinks": None}, "sinks is None"),
    ],
)
def test_an_invalid_size_of_static_graphs_is_named(sizes: dict[str, Any], name: str) -> None:
    with pytest.raises(PackageError, match=name):
        StaticSpec(**sizes)
    raw = a_manifest().to_json().decode()
    with pytest.raises(PackageError, match=name):
        Manifest.from_json(raw.replace('{"arch', json.dumps({"static": sizes})[:-1] + ',"arch', 1).encode())


def test_layers_that_share_keys_and_values_must_be_in_one_span() -> None:
    layers = LAYERS
    manifest = a_manifest(together=((1, layers),), grid=(0, 1, layers))
    assert Manifest.from_json(manifest.to_json()) == manifest
    assert manifest.span_parts(LayerRange(1, layers))[0] == layer_part(1)
    with pytest.raises(PackageError, match=rf"layers 0:2 divide 1:{layers}, .* serve all of these or none"):
        manifest.span_parts(LayerRange(0, 2))


def test_a_grid_that_divides_layers_which_must_stay_together_is_refused() -> None:
    with pytest.raises(PackageError, match=rf"the grid's boundary 2 divides layers 1:{LAYERS}"):
        a_manifest(together=((1, LAYERS),), grid=(0, 1, 2, LAYERS))


def test_unset_optional_fields_are_omitted_and_do_not_change_the_digest() -> None:
    plain = json.loads(a_manifest().to_json())
    assert "together" not in plain
    assert "experts" not in plain["layers"][0]
    experts = a_manifest(layers=(LayerSpec(kv_heads=2, key_size=8, value_size=8, experts=4),) * LAYERS)
    assert Manifest.from_json(experts.to_json()) == experts
    assert experts.digest != a_manifest().digest
