"""Recognises files that are not GGUF files by their first bytes, with a remedy for each kind."""

from __future__ import annotations

import re

_CONVERT = "Convert it with llama.cpp's convert_hf_to_gguf.py, or download a .gguf file of the same model."
_DOWNLOAD = "Download the model file again."

# Magic numbers in the order of the file's bytes, which is the reverse of the name.
_OLD_GGML = {b"lmgg": "ggml", b"fmgg": "ggmf", b"tjgg": "ggjt", b"algg": "ggla", b"nsgg": "ggsn"}

_BEGINNINGS: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip archive: PyTorch weights (.bin, .pt) or a packed download", _CONVERT),
    (b"PK\x05\x06", "an empty zip archive", _DOWNLOAD),
    (b"\x80\x02", "a Python pickle: old PyTorch weights", _CONVERT),
    (b"\x80\x04", "a Python pickle", _CONVERT),
    (b"\x89HDF", "an HDF5 file: Keras or TensorFlow weights", _CONVERT),
    (b"\x1f\x8b", "a gzip archive", "Unpack it first (gunzip)."),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive", "Unpack it first (zstd -d)."),
    (b"\xfd7zXZ", "an xz archive", "Unpack it first (unxz)."),
    (b"7z\xbc\xaf", "a 7z archive", "Unpack it first."),
    (b"Rar!", "a RAR archive", "Unpack it first."),
    (b"\x7fELF", "a program, not a model", "Give the path of a .gguf file."),
    (b"#!", "a script, not a model", "Give the path of a .gguf file."),
)


def describe(beginning: bytes, file_bytes: int) -> tuple[str, str]:
    """Message and remedy for a file of ``file_bytes`` that does not begin with ``GGUF``."""
    if file_bytes == 0:
        return "the file is empty", _DOWNLOAD
    kind, remedy = _kind(beginning)
    return f"not a GGUF file: it begins with {_shown(beginning[:8])}{kind and f', {kind}'}", remedy


def _shown(beginning: bytes) -> str:
    """Return the bytes as text if they are printable, else in hexadecimal."""
    text = beginning.decode("ascii", "replace")
    return f"'{text}'" if text.isascii() and text.isprintable() else beginning.hex(" ")


def _kind(beginning: bytes) -> tuple[str, str]:
    magic = beginning[:4]
    if magic in _OLD_GGML or magic[::-1] in _OLD_GGML:
        name = _OLD_GGML.get(magic) or _OLD_GGML[magic[::-1]]
        return f"the {name} format that llama.cpp dropped in August 2023", (
            "Download a .gguf file of the same model, or convert it from the original weights."
        )
    if beginning.startswith(b"version https://git-lfs"):
        size = re.search(rb"^size (\d{1,20})$", beginning, re.MULTILINE)
        of = f" for a file of {int(size[1])} bytes" if size else ""
        return f"a git-lfs pointer{of}, not the file itself", (
            "Fetch the file itself: `git lfs pull` in the repository, or download it from the model's page."
        )
    if len(beginning) > 8 and beginning[8:9] == b"{" and int.from_bytes(beginning[:8], "little") < 1 << 32:
        return "a .safetensors file", _CONVERT
    for start, kind, remedy in _BEGINNINGS:
        if beginning.startswith(start):
            return kind, remedy
    if not beginning.strip(b"\0"):
        return "zero bytes: a download that reserved its space and did not finish", _DOWNLOAD
    text = beginning.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head", b"<!--")):
        return "a web page: the download returned an error page or a login form", (
            "Download the file by its direct link (on Hugging Face: /resolve/main/, not /blob/main/)."
        )
    if text.startswith((b"{", b"[")):
        return "JSON: the download returned an error, or this is a model's config", _DOWNLOAD
    if text.startswith((b"access denied", b"invalid username", b"entry not found", b"repository not found")):
        return "an error message of the download", _DOWNLOAD
    return "", "Download it again, or give the path of a .gguf file."
