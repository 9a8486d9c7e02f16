"""The archive of a release that a machine gets, and the reasons."""

from __future__ import annotations

import re

import pytest

from llamasup.errors import DownloadFailed, RuntimeMissing
from llamasup.features.runtimes.assets import Machine, choose, named, read_release
from tests.features.runtimes.releases import ARCHIVES, release

LINUX = Machine("ubuntu", "x64")
WINDOWS = Machine("win", "x64")
RELEASE = release(dict.fromkeys(ARCHIVES, b"archive"), "https://example.org")
OLD = release(
    {"llama-b10605-bin-win-cpu-x64.zip": b"", "llama-b10605-bin-ubuntu-x64.tar.gz": b""}, "https://h"
)
CUDA_13, CUDA_12, CUDA_11 = (13, 0), (12, 9), (11, 8)


def machine(base: Machine, **facts: object) -> Machine:
    return Machine(base.system, base.arch, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("here", "wanted", "name", "reasons"),
    [
        (LINUX, "auto", "b11462-cpu", ["the CPU computes"]),
        (machine(LINUX, cuda=CUDA_13), "auto", "b11462-cuda-13.4", ["supports CUDA 13.0"]),
        (machine(LINUX, cuda=CUDA_12), "auto", "b11462-cuda-12.8", ["supports CUDA 12.9"]),
        (
            machine(LINUX, cuda=CUDA_11, vulkan=True),
            "auto",
            "b11462-vulkan",
            ["no archive with cuda for CUDA 11.8 or older", "a Vulkan driver"],
        ),
        (machine(LINUX, rocm=True, vulkan=True), "auto", "b11462-rocm-10.0", ["ROCm is installed"]),
        (machine(LINUX, cuda=CUDA_13, rocm=True), "auto", "b11462-cuda-13.4", ["NVIDIA"]),
        (machine(LINUX, vulkan=True), "auto", "b11462-vulkan", ["a Vulkan driver"]),
        (LINUX, "cuda", "b11462-cuda-13.4", ["--backend cuda"]),
        (LINUX, "sycl", "b11462-sycl-fp32", ["--backend sycl"]),
        (Machine("ubuntu", "arm64"), "auto", "b11462-cpu", ["the CPU computes"]),
        (
            Machine("ubuntu", "arm64", cuda=CUDA_13, vulkan=True),
            "auto",
            "b11462-vulkan",
            ["no archive with cuda", "a Vulkan driver"],
        ),
        (Machine("macos", "arm64"), "auto", "b11462-metal", ["a GPU of Apple"]),
        (Machine("macos", "x64"), "auto", "b11462-cpu", ["the CPU computes"]),
        (WINDOWS, "auto", "b11462-cpu", ["the CPU computes"]),
        (machine(WINDOWS, cuda=CUDA_13), "auto", "b11462-cuda-13.4", ["NVIDIA"]),
        (machine(WINDOWS, rocm=True), "auto", "b11462-rocm-radeon", ["ROCm"]),
    ],
)
def test_machine_gets_the_fastest_archive_that_it_can_use(
    here: Machine, wanted: str, name: str, reasons: list[str]
) -> None:
    choice = choose(read_release(RELEASE, here), here, wanted)
    assert choice.archive.name == name
    assert len(choice.reasons) == len(reasons)
    assert all(part in reason for part, reason in zip(reasons, choice.reasons, strict=True))


@pytest.mark.parametrize(
    ("here", "names"),
    [
        (
            machine(LINUX, cuda=CUDA_13),
            [
                "llama-b11462-bin-ubuntu-cuda-13.4-x64.tar.gz",
                "cudart-llama-b11462-bin-ubuntu-cuda-13.4-x64.tar.gz",
            ],
        ),
        (machine(LINUX, cuda=CUDA_12), ["llama-b11462-bin-ubuntu-cuda-12.8-x64.tar.gz"]),
        (
            machine(WINDOWS, cuda=CUDA_13),
            ["llama-b11462-bin-win-cuda-13.4-x64.zip", "cudart-llama-bin-win-cuda-13.4-x64.zip"],
        ),
    ],
)
def test_archive_of_cuda_comes_with_its_libraries(here: Machine, names: list[str]) -> None:
    archive = choose(read_release(RELEASE, here), here).archive
    assert [file.name for file in archive.files] == names
    assert archive.size_bytes == 7 * len(names)
    assert all(len(file.sha256 or "") == 64 for file in archive.files)


@pytest.mark.parametrize(
    ("body", "here", "wanted", "error", "text"),
    [
        (RELEASE, Machine("", "x64"), "auto", RuntimeMissing, "another system"),
        (RELEASE, Machine("ubuntu", ""), "auto", RuntimeMissing, "another processor"),
        (RELEASE, LINUX, "metal", RuntimeMissing, "no archive with metal"),
        (RELEASE, machine(LINUX, cuda=CUDA_11), "cuda", RuntimeMissing, "CUDA 11.8 or older"),
        (OLD, LINUX, "vulkan", RuntimeMissing, "no archive with vulkan"),
        (b"<html>", LINUX, "auto", DownloadFailed, "cannot be read"),
        (RELEASE.replace(b"https://example.org", b"/etc"), LINUX, "auto", DownloadFailed, "address"),
        (RELEASE.replace(b'"size": 7', b'"size": -7'), LINUX, "auto", DownloadFailed, "address and size"),
        (b'{"message": "Not Found"}', LINUX, "auto", DownloadFailed, "cannot be read"),
    ],
)
def test_refusal_names_the_reason(
    body: bytes, here: Machine, wanted: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        choose(read_release(body, here), here, wanted)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("llama-b11462-bin-ubuntu-cuda-13.4-x64.tar.gz", "b11462-cuda-13.4"),
        ("llama-b10605-bin-win-cpu-x64.zip", "b10605-cpu"),
        ("llama-b11462-bin-macos-arm64.tar.gz", "b11462-metal"),
        ("llama-b11462-bin-macos-x64.tar.gz", "b11462-cpu"),
        ("llama_cpp_server-0.10068.0-py3-none-manylinux_2_35_x86_64.whl", "llama_cpp_server-0.10068.0"),
        ("my build (2).tar.xz", "my-build--2-"),
        (".zip", "build"),
        ("..", "build"),
        ("good.tar", "good"),
        ("previous.zip", "build-previous"),
        ("-x.tar.gz", "x"),
        ("chosen.json.tar.gz", "build-chosen.json"),
        ("a" * 300 + ".zip", "a" * 100),
    ],
)
def test_given_file_has_a_name_for_its_folder(file: str, name: str) -> None:
    assert named(file).name == name


@pytest.mark.parametrize(
    ("digest", "known"), [("", False), ("md5:00", False), ("sha256:", False), ("SHA256:" + "AB" * 32, True)]
)
def test_digest_is_a_sha256_or_unknown(digest: str, known: bool) -> None:
    body = re.sub(rb'"digest": "[^"]*"', f'"digest": "{digest}"'.encode(), RELEASE)
    files = [file for archive in read_release(body, LINUX) for file in archive.files]
    assert files
    assert {file.sha256 for file in files} == {"ab" * 32 if known else None}


def test_release_without_digests_is_read() -> None:
    body = release(dict.fromkeys(ARCHIVES, b""), "https://h", digests=False)
    assert all(file.sha256 is None for archive in read_release(body, LINUX) for file in archive.files)


def test_version_with_thousands_of_digits_is_no_version() -> None:
    body = RELEASE.replace(b"cuda-13.4", b"cuda-" + b"9" * 5000)
    assert choose(read_release(body, LINUX), LINUX, "cuda").archive.variant == "12.8"
