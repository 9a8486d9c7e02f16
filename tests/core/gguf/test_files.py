"""Model files on a real file system, good ones and all the others."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest

from llamasup.core.gguf import files
from llamasup.core.gguf.facts import ModelClass, ModelFacts
from llamasup.core.gguf.files import read_model, split_paths
from llamasup.core.system.native import native
from llamasup.errors import LlamasupError, ModelInvalid, ModelMissing
from tests.kit import models
from tests.kit.gguf_writer import I32, U16, write_gguf

Read = Callable[[str | Path], ModelFacts]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """``read_model`` with a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return read_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models_folder = tmp_path / "models"
    models_folder.mkdir()
    return models_folder


def written(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refused(read: Read, path: str | Path, kind: type[LlamasupError] = ModelInvalid) -> LlamasupError:
    with pytest.raises(kind) as caught:
        read(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert caught.value.remedy
    return caught.value


# --- good files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "model_class"),
    [
        (models.tiny_decoder, ModelClass.DECODER),
        (models.other_vocabulary, ModelClass.DECODER),
        (models.big_endian_decoder, ModelClass.DECODER),
        (models.tiny_encoder, ModelClass.ENCODER),
        (models.tiny_reranker, ModelClass.RERANKER),
        (models.tiny_lora, ModelClass.LORA),
        (models.tiny_projector, ModelClass.PROJECTOR),
        (models.vocabulary_only, ModelClass.VOCAB),
    ],
)
def test_each_kind_of_model_file_is_recognised(
    make: Callable[[], bytes], model_class: ModelClass, folder: Path, read: Read
) -> None:
    assert read(written(folder, make())).model_class is model_class


def test_large_model_is_read_only_by_its_header(folder: Path, read: Read) -> None:
    path = models.write_large_decoder(folder / "large.gguf", 60_000_000)
    facts = read(path)
    assert facts.file_bytes == path.stat().st_size == facts.expected_bytes
    assert 45_000_000 < facts.file_bytes < 75_000_000
    assert facts.quantization == "Q8_0"
    assert facts.head_counts_kv == (4,) * facts.layers
    assert facts.quantized_kv_fits


def test_a_name_with_spaces_quotes_and_umlauts_is_a_name(folder: Path, read: Read) -> None:
    path = written(folder, models.tiny_decoder(), '-wei ß\'s "model" 模型.gguf')
    assert read(path).architecture == "llama"
    assert read(str(path)).architecture == "llama"


def test_a_symbolic_link_is_followed(folder: Path, read: Read) -> None:
    target = written(folder, models.tiny_decoder(), "blob")
    link = folder / "model.gguf"
    link.symlink_to(target)
    assert read(link).architecture == "llama"


# --- split sets ----------------------------------------------------------------------------------


def test_a_split_set_gives_the_facts_of_the_whole_model(folder: Path, read: Read) -> None:
    whole = read(written(folder, models.tiny_decoder()))
    parts = models.write_split_decoder(folder)
    facts = read(parts[0])
    assert facts.split.count == 3
    assert facts.parameters == whole.parameters
    assert facts.weights_bytes == whole.weights_bytes
    assert facts.layer_bytes == whole.layer_bytes
    assert facts.file_bytes == sum(part.stat().st_size for part in parts)
    assert split_paths(parts[0], 3) == parts


def test_a_split_set_with_a_part_missing_names_the_part(folder: Path, read: Read) -> None:
    parts = models.write_split_decoder(folder)
    read(parts[0])
    parts[1].unlink()
    with pytest.raises(ModelMissing) as caught:
        read(parts[0])
    assert caught.value.message == f"{parts[1]}: part 2 of the model {parts[0].name} is missing"


def test_a_split_set_with_a_truncated_part_names_the_part(folder: Path, read: Read) -> None:
    parts = models.write_split_decoder(folder)
    os.truncate(parts[2], parts[2].stat().st_size // 2)
    with pytest.raises(ModelInvalid) as caught:
        read(parts[0])
    assert caught.value.message.startswith(f"{parts[2]}: truncated: ")


def test_split_set_with_swapped_parts_is_refused(folder: Path, read: Read) -> None:
    parts = models.write_split_decoder(folder)
    shutil.copyfile(parts[1], parts[2])
    with pytest.raises(ModelInvalid, match="the name says part 3, but the header says part 2 of 3"):
        read(parts[0])


def test_a_later_part_asks_for_the_first(folder: Path, read: Read) -> None:
    parts = models.write_split_decoder(folder)
    assert "part 2 of a model in 3 files" in refused(read, parts[1]).message


def test_a_first_part_under_another_name_is_refused_as_llama_server_would(folder: Path, read: Read) -> None:
    parts = models.write_split_decoder(folder)
    renamed = parts[0].rename(folder / "renamed.gguf")
    error = refused(read, renamed)
    assert "the header says part 1 of 3, but the name does not" in error.message
    assert "NAME-00001-of-00003.gguf" in error.remedy


@pytest.mark.skipif(os.name == "nt", reason="no FIFOs")
def test_a_part_that_is_a_pipe_is_refused_and_not_waited_for(folder: Path, read: Read) -> None:
    parts = models.write_split_decoder(folder)
    parts[1].unlink()
    os.mkfifo(parts[1])
    with pytest.raises(ModelInvalid, match="is a named pipe"):
        read(parts[0])


def test_a_part_that_links_to_itself_is_refused(folder: Path, read: Read) -> None:
    parts = models.write_split_decoder(folder)
    parts[1].unlink()
    parts[1].symlink_to(parts[1])
    with pytest.raises(ModelMissing, match="form a circle"):
        read(parts[0])


def test_a_split_number_that_lies_is_refused(folder: Path, read: Read) -> None:
    keys = {"split.no": U16(5), "split.count": U16(3), "split.tensors.count": I32(0)}
    assert "split.no at offset" in refused(read, written(folder, write_gguf(keys, []))).message


# --- no such file --------------------------------------------------------------------------------


def test_missing_file_is_reported_with_similar_names(folder: Path, read: Read) -> None:
    written(folder, b"", "qwen2.5-7b-q4_k_m.gguf")
    written(folder, b"", "gemma.gguf")
    error = refused(read, folder / "qwen2.5-7b-q4km.gguf", ModelMissing)
    assert "there is no such file" in error.message
    assert error.remedy == f"Did you mean {folder / 'qwen2.5-7b-q4_k_m.gguf'}?"
    assert error.exit_code == 66


def test_missing_file_whose_path_is_too_long_for_windows(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / ("m" * 200) / "x.gguf"
    monkeypatch.setattr(native, "longest_path", lambda: len(str(path)) - 1)
    error = refused(read, path, ModelMissing)
    assert f"has {len(str(path))} characters, and Windows finds no file with more than" in error.message
    assert "LongPathsEnabled" in error.remedy
    monkeypatch.setattr(native, "longest_path", lambda: len(str(path)))
    assert "there is no such file" in refused(read, path, ModelMissing).message
    wide = folder / ("😀" * 50) / "x.gguf"  # UTF-16 has two characters for each
    monkeypatch.setattr(native, "longest_path", lambda: len(str(wide)) + 49)
    assert f"has {len(str(wide)) + 50} characters" in refused(read, wide, ModelMissing).message
    monkeypatch.setattr(native, "longest_path", lambda: 1)
    assert "characters" not in refused(read, Path(f"\\\\?\\{path}"), ModelMissing).message


def test_missing_file_without_similar_names_lists_the_folder(folder: Path, read: Read) -> None:
    written(folder, b"", "gemma.gguf")
    error = refused(read, folder / "x", ModelMissing)
    assert error.remedy == "The models in that folder are gemma.gguf."


def test_a_missing_file_in_a_folder_without_models(folder: Path, read: Read) -> None:
    assert "There is no .gguf file in" in refused(read, folder / "x", ModelMissing).remedy


def test_a_missing_file_in_a_folder_that_may_not_be_listed(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(os, "scandir", refuse)
    assert "There is no .gguf file in" in refused(read, folder / "x", ModelMissing).remedy


def test_a_missing_file_in_a_missing_folder(folder: Path, read: Read) -> None:
    missing = folder / "not" / "there.gguf"
    assert f"and no folder {missing.parent}" in refused(read, missing, ModelMissing).message


def test_a_dangling_link_names_where_it_leads(folder: Path, read: Read) -> None:
    link = folder / "model.gguf"
    link.symlink_to("gone.gguf")
    assert (
        "is a symbolic link to gone.gguf, which does not exist" in refused(read, link, ModelMissing).message
    )


def test_a_symlink_loop_is_named(folder: Path, read: Read) -> None:
    one, two = folder / "one.gguf", folder / "two.gguf"
    one.symlink_to(two)
    two.symlink_to(one)
    assert "the symbolic links form a circle" in refused(read, one, ModelMissing).message


def test_a_folder_names_the_models_in_it_and_how_to_name_one(folder: Path, read: Read) -> None:
    models.write_split_decoder(folder, "big model")
    for index in range(9):
        written(folder, b"", f"m{index}.gguf")
    error = refused(read, folder, ModelMissing)
    assert "is a folder; the models in it are big model-00001-of-00003.gguf, m0.gguf" in error.message
    assert error.message.endswith("m6.gguf and 2 more")
    assert error.remedy == f"Name one of them, for example '{folder / 'big model-00001-of-00003.gguf'}'."


def test_folder_without_models_is_reported(folder: Path, read: Read) -> None:
    assert "is a folder without .gguf files" in refused(read, folder, ModelMissing).message


def test_a_path_below_a_file(folder: Path, read: Read) -> None:
    path = written(folder, b"")
    assert "Not a directory" in refused(read, path / "x.gguf", ModelMissing).message


def test_a_path_with_a_nul(read: Read) -> None:
    with pytest.raises(ModelMissing, match="is not a path"):
        read("a\0b")


def test_a_name_that_is_too_long(folder: Path, read: Read) -> None:
    assert "File name too long" in refused(read, folder / ("x" * 300), ModelMissing).message


def test_a_file_that_the_system_refuses_to_open(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's answer is put in its place, since root may read everything."""
    path = written(folder, models.tiny_decoder())

    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "open", refuse)
    error = refused(read, path, ModelMissing)
    assert "may not be read (Permission denied)" in error.message
    assert "chmod" in error.remedy


# --- no model ------------------------------------------------------------------------------------


def test_an_empty_file(folder: Path, read: Read) -> None:
    error = refused(read, written(folder, b""))
    assert error.message.endswith("the file is empty")
    assert error.exit_code == 65


def test_file_that_is_not_gguf(folder: Path, read: Read) -> None:
    path = written(folder, b"PK\x03\x04" + bytes(100), "pytorch_model.bin")
    assert "a zip archive: PyTorch weights" in refused(read, path).message


def test_a_truncated_model(folder: Path, read: Read) -> None:
    path = written(folder, models.truncated_decoder(0.25))
    assert "truncated: 169040 of 676160 bytes, 25.0 %" in refused(read, path).message


@pytest.mark.skipif(os.name == "nt", reason="no FIFOs")
def test_a_named_pipe_is_refused_and_not_waited_for(folder: Path, read: Read) -> None:
    path = folder / "model.gguf"
    os.mkfifo(path)
    assert "is a named pipe, not a model file" in refused(read, path).message


@pytest.mark.skipif(os.name == "nt", reason="no device files")
def test_a_device_is_refused(read: Read) -> None:
    assert "is a character device" in refused(read, "/dev/zero").message


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix sockets")
def test_a_socket_is_refused(folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # a socket's path has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("s.gguf")
        assert "is a socket" in refused(read, "s.gguf").message


def test_a_file_that_shrinks_while_it_is_read(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(folder, models.tiny_decoder())
    fill = files._fill

    def shrink_then_fill(file: BinaryIO, header: bytearray) -> int:
        os.truncate(path, 1000)
        return fill(file, header)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_fill", shrink_then_fill)
    error = refused(read, path)
    assert "changed while it was read, from 676160 to 1000 bytes" in error.message


def test_a_file_that_grows_while_it_is_read(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(folder, models.tiny_decoder())
    fill = files._fill

    def fill_then_grow(file: BinaryIO, header: bytearray) -> int:
        filled = fill(file, header)  # type: ignore[arg-type]
        os.truncate(path, 700_000)
        return filled

    monkeypatch.setattr(files, "_fill", fill_then_grow)
    assert "changed while it was read, from 676160 to 700000 bytes" in refused(read, path).message


_MEASURED_CHILD = """
import sys
from pathlib import Path
from llamasup.errors import ModelInvalid
from llamasup.core.gguf.files import read_model

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])

before = kilobytes("VmRSS")
try:
    print(read_model(sys.argv[1]).parameters)
except ModelInvalid as error:
    print(error.message)
print(1024 * (kilobytes("VmHWM") - before))
"""


def read_in_a_child(path: Path) -> tuple[str, int]:
    """What it says of the file, and by how many bytes the process grew at its peak."""
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED_CHILD, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said, grown = done.stdout.splitlines()
    return said, int(grown)


def large_header(*keys: tuple[str, int, bytes], tensors: int = 0) -> bytes:
    """Raw keys (name, type, value) and ``tensors`` of eight f32, one after the other."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    return b"".join(
        [
            b"GGUF" + struct.pack("<IQQ", 3, tensors, len(keys)),
            *(text(name) + struct.pack("<I", kind) + value for name, kind, value in keys),
            *(text(f"t{index}") + struct.pack("<IQIQ", 1, 8, 0, 32 * index) for index in range(tensors)),
        ]
    )


_KEYS_OF_A_MODEL = (
    ("general.architecture", 8, struct.pack("<Q", 5) + b"llama"),
    *(
        (f"llama.{name}", 4, struct.pack("<I", 4))
        for name in ("block_count", "context_length", "embedding_length")
    ),
)
# As much of everything as the reader takes: kept arrays of numbers, 28 MiB that are stepped over, tensors.
_MAX_OF_ALL = (
    *_KEYS_OF_A_MODEL,
    *((f"k{index}", 9, struct.pack("<IQ", 4, 4000) + bytes(range(1, 251)) * 64) for index in range(46)),
    ("pad", 9, struct.pack("<IQ", 0, 28 << 20) + bytes(28 << 20)),
)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads its memory from /proc")
@pytest.mark.parametrize(
    ("header", "says"),
    [
        (large_header(("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 1 << 30))), "within 32 MiB"),
        (large_header(("tokenizer.ggml.scores", 9, struct.pack("<IQ", 6, 1 << 33))), "within 32 MiB"),
        (large_header(("general.name", 8, struct.pack("<Q", 1 << 34))), "within 32 MiB"),
        (large_header(("general.name", 8, struct.pack("<Q", 1 << 63))), "claims 9223372036854775808 bytes"),
        (large_header(("a", 9, struct.pack("<IQ", 4, 1 << 40))), "is 1099511627776, which needs"),
        (large_header(*_MAX_OF_ALL, tensors=16_384), "131072"),
    ],
    ids=["strings", "floats", "string", "string of 2^63", "array of 2^40", "most of all"],
)
def test_no_header_takes_more_than_50_mb(header: bytes, says: str, folder: Path) -> None:
    """In a sparse file of 64 GiB, so that there is always more to read. Measured: 33 to 44 MB."""
    path = written(folder, header)
    os.truncate(path, 1 << 36)
    said, grown_bytes = read_in_a_child(path)
    assert says in said
    assert grown_bytes < 50_000_000


@pytest.mark.skipif(os.name == "nt", reason="handles are counted otherwise")
def test_file_descriptors_are_always_closed(folder: Path, read: Read) -> None:
    good = written(folder, models.tiny_decoder())
    bad = written(folder, models.truncated_decoder(), "bad.gguf")
    before = psutil.Process().num_fds()
    for _ in range(5):
        read(good)
        refused(read, bad)
    assert psutil.Process().num_fds() == before


# --- the cache -----------------------------------------------------------------------------------


def test_facts_are_cached_until_the_file_changes(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(folder, models.tiny_decoder())
    first = read(path)
    reads: list[Path] = []
    read_file = files._read

    def counted(path: Path) -> object:
        reads.append(path)
        return read_file(path)

    monkeypatch.setattr(files, "_read", counted)
    assert read(path) == first
    assert reads == []

    path.write_bytes(models.other_vocabulary())
    assert read(path).vocab_size != first.vocab_size
    assert reads == [path]


def test_facts_of_a_split_set_are_cached_until_one_part_changes(
    folder: Path, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = models.write_split_decoder(folder)
    first = read(parts[0])
    reads: list[Path] = []
    read_file = files._read

    def counted(path: Path) -> object:
        reads.append(path)
        return read_file(path)

    monkeypatch.setattr(files, "_read", counted)
    assert read(parts[0]) == first
    assert reads == []

    status = parts[2].stat()
    os.utime(parts[2], ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000_000))
    assert read(parts[0]) == first
    assert reads == parts


def test_error_is_not_cached(folder: Path, read: Read) -> None:
    path = written(folder, models.truncated_decoder())
    refused(read, path)
    path.write_bytes(models.tiny_decoder())
    assert read(path).architecture == "llama"


def test_file_that_aria2_still_downloads_is_refused(tmp_path: Path) -> None:
    """It has its whole size from the beginning, and its header soon after."""
    path = tmp_path / "x.gguf"
    path.write_bytes(models.tiny_decoder())
    control = tmp_path / "x.gguf.aria2"
    control.touch()
    with pytest.raises(ModelInvalid, match=r"the download is not complete: aria2 still has x\.gguf\.aria2"):
        read_model(path)
    control.unlink()
    assert read_model(path).layers
