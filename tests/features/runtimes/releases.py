"""A release of llama.cpp as its API describes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

ARCHIVES = (
    "llama-b11462-bin-macos-arm64.tar.gz",
    "llama-b11462-bin-macos-x64.tar.gz",
    "llama-b11462-bin-ubuntu-arm64.tar.gz",
    "llama-b11462-bin-ubuntu-cuda-12.8-x64.tar.gz",
    "llama-b11462-bin-ubuntu-cuda-13.4-x64.tar.gz",
    "llama-b11462-bin-ubuntu-rocm-10.0-x64.tar.gz",
    "llama-b11462-bin-ubuntu-s390x.tar.gz",
    "llama-b11462-bin-ubuntu-sycl-fp16-x64.tar.gz",
    "llama-b11462-bin-ubuntu-sycl-fp32-x64.tar.gz",
    "llama-b11462-bin-ubuntu-vulkan-arm64.tar.gz",
    "llama-b11462-bin-ubuntu-vulkan-x64.tar.gz",
    "llama-b11462-bin-ubuntu-x64.tar.gz",
    "llama-b11462-bin-win-cpu-arm64.zip",
    "llama-b11462-bin-win-cpu-x64.zip",
    "llama-b11462-bin-win-cuda-12.4-x64.zip",
    "llama-b11462-bin-win-cuda-13.4-x64.zip",
    "llama-b11462-bin-win-hip-radeon-x64.zip",
    "llama-b11462-bin-win-vulkan-x64.zip",
    "llama-b11462-xcframework.zip",
    "cudart-llama-b11462-bin-ubuntu-cuda-13.4-x64.tar.gz",
    "cudart-llama-bin-win-cuda-13.4-x64.zip",
)


def release(files: Mapping[str, bytes], base: str, *, build: str = "b11462", digests: bool = True) -> bytes:
    """The answer of the API: more fields than are read, and the digests of the files."""
    assets = [
        {
            "name": name,
            "browser_download_url": f"{base}/{name}",
            "size": len(content),
            "content_type": "application/gzip",
            **({"digest": f"sha256:{hashlib.sha256(content).hexdigest()}"} if digests else {}),
        }
        for name, content in files.items()
    ]
    return json.dumps({"tag_name": build, "prerelease": False, "assets": assets}).encode()
