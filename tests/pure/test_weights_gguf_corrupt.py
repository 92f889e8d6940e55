"""Damaged GGUF files: each is one clear error, and none hangs, crashes or takes memory for what it claims."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_files import LLAMA_META, write_gguf

from vkdecode.errors import ModelFileError, UnsupportedModelError, VkDecodeError
from vkdecode.weights import open_weights
from vkdecode.weights.gguf_header import read_header

STRING, ARRAY, U8, U32, U64 = 8, 9, 0, 4, 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def header(entries: list[bytes], tensors: list[bytes], *, version: int = 3, data: int = 256) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def refusal(path: Path, content: bytes, kind: type[VkDecodeError] = ModelFileError) -> str:
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(kind) as caught:
            open_weights(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {
        "token_embd.weight": np.ones((8, 32), np.float32),
        "blk.0.attn_q.weight": np.ones((32, 32), np.float32),
        "output_norm.weight": np.ones(32, np.float32),
    }
    meta = {**LLAMA_META, "tokenizer.ggml.tokens": ["a", "b", "long token"], "tokenizer.ggml.scores": [0.5, 1.5, 2.5]}
    return write_gguf(tmp_path_factory.mktemp("sound") / "m.gguf", meta, tensors, "Q8_0")


def test_not_gguf(path: Path) -> None:
    for content in (b"", b"G", b"GGUF", b"PK\x03\x04" + bytes(100), bytes(100)):
        refusal(path, content)
    assert "older than GGUF" in refusal(path, b"tjgg" + bytes(100))


def test_versions(path: Path) -> None:
    assert "version 1" in refusal(path, header([], [], version=1))
    assert "version 4" in refusal(path, header([], [], version=4))
    assert "version 0" in refusal(path, header([], [], version=0))
    assert "big-endian" in refusal(path, header([], [], version=3 << 24))


@pytest.mark.parametrize("counts", [(1 << 60, 0), (0, 1 << 60), ((1 << 64) - 1, (1 << 64) - 1), (12, 0), (0, 25)])
def test_absurd_counts(path: Path, counts: tuple[int, int]) -> None:
    refusal(path, b"GGUF" + struct.pack("<IQQ", 3, *counts) + bytes(256))


@pytest.mark.parametrize(
    "value",
    [
        entry("k", STRING, struct.pack("<Q", 1 << 62)),
        entry("k", STRING, struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc"),
        entry("k", ARRAY, struct.pack("<IQ", U8, 1 << 62)),
        entry("k", ARRAY, struct.pack("<IQ", U64, 1 << 61)),
        entry("k", ARRAY, struct.pack("<IQ", STRING, 1 << 61)),
        entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) + struct.pack("<IQ", U8, 0)),
        entry("k", ARRAY, struct.pack("<IQ", 99, 1)),
        entry("k", 77, b""),
        struct.pack("<Q", 1 << 40) + b"key",
        entry("k", U32, b"\0\0\0\0") + entry("k", U32, b"\0\0\0\0"),
    ],
)
def test_metadata_that_lies(path: Path, value: bytes) -> None:
    count = 2 if value.count(b"k") == 2 else 1
    refusal(path, b"GGUF" + struct.pack("<IQQ", 3, 0, count) + value + bytes(64))


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ([tensor("t", (1 << 40,))], "ends at byte"),
        ([tensor("t", (1 << 62, 1 << 62))], "ends at byte"),
        ([tensor("t", (4,), offset=1 << 50)], "ends at byte"),
        ([tensor("t", (4,), offset=4)], "aligned"),
        ([tensor("t", (0, 4))], "empty shape"),
        ([tensor("t", ())], "0 dimensions"),
        ([tensor("t", (1, 1, 1, 1, 1))], "5 dimensions"),
        ([text("t") + struct.pack("<I", 1 << 30)], "dimensions"),
        ([tensor("t", (33,), kind=8)], "multiple"),
        ([tensor("t", (4,)), tensor("t", (4,), offset=32)], "twice"),
        ([tensor("t", (16,)), tensor("u", (4,), offset=32)], "overlap"),
    ],
)
def test_tensors_that_lie(path: Path, tensors: list[bytes], word: str) -> None:
    assert word in refusal(path, header([], tensors))


def test_unknown_tensor_type(path: Path) -> None:
    assert "type 4242" in refusal(path, header([], [tensor("t", (4,), kind=4242)]), UnsupportedModelError)


@pytest.mark.parametrize("alignment", [0, 3, 1 << 31])
def test_alignment_that_is_none(path: Path, alignment: int) -> None:
    meta = [entry("general.alignment", U32, struct.pack("<I", alignment))]
    assert "alignment" in refusal(path, header(meta, [tensor("t", (4,))]))


def test_no_architecture(path: Path) -> None:
    assert "general.architecture" in refusal(path, header([], [tensor("t", (4,))]))


def test_truncation_at_every_length(path: Path, sound: Path) -> None:
    whole = sound.read_bytes()
    for length in [*range(0, len(whole) - 64, 3), len(whole) - 40, len(whole) - 33]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError) as caught:
            open_weights(path)
        assert "\n" not in str(caught.value)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_never_crash(path: Path, sound: Path, data: st.DataObject) -> None:
    whole = bytearray(sound.read_bytes())
    end = min(tensor.offset for tensor in read_header(sound).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        source = open_weights(path)
        for name in source.names():
            assert source.read(name).shape == source.info(name).read_shape
    except VkDecodeError as error:
        assert "\n" not in str(error)


def test_file_that_shrinks_while_open_is_an_error_not_a_crash(path: Path, sound: Path) -> None:
    path.write_bytes(sound.read_bytes())
    source = open_weights(path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 200)
    with pytest.raises(ModelFileError, match="ends early"):
        for name in source.names():
            source.read(name)
