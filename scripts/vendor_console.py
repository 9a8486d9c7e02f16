"""The libraries of the console: fetched from npm at pinned versions, and checked.

python scripts/vendor_console.py            fetch the packages, verify them, write the files and versions.json
python scripts/vendor_console.py --check    exit code 1 if a file differs from versions.json; no network

The registry is that of `npm config get registry`, or of --registry. A package must have the SHA-512 below,
whatever the registry says. To take another version: change PACKAGES and run this script.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx

ROOT = Path(__file__).resolve().parents[1]
VENDOR = ROOT / "llamasup" / "features" / "console" / "static" / "assets" / "vendor"
MANIFEST = "versions.json"


class Package(NamedTuple):
    """``files``: the path in the package of each file that is kept, by its name here."""

    version: str
    integrity: str
    files: Mapping[str, str]


PACKAGES = {
    "preact": Package(
        "10.27.2",
        "sha512-5SYSgFKSyhCbk6SrXyMpqjb5+MQBgfvEKE/OC+PujcY34sOpqtr+0AZQtPYx5IA6VxynQ7rUPCtKzyovpj9Bpg==",
        {
            "preact.module.js": "dist/preact.module.js",
            "hooks.module.js": "hooks/dist/hooks.module.js",
            "LICENSE.preact": "LICENSE",
        },
    ),
    "htm": Package(
        "3.1.1",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        {"htm.module.js": "dist/htm.module.js", "LICENSE.htm": "LICENSE"},
    ),
    "uplot": Package(
        "1.6.32",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        {
            "uPlot.esm.js": "dist/uPlot.esm.js",
            "uPlot.min.css": "dist/uPlot.min.css",
            "LICENSE.uPlot": "LICENSE",
        },
    ),
}

# The policy of the page forbids an import map, which a bare name would need.
_BARE_IMPORT = re.compile(rb"""(\bfrom\s*["'])preact(["'])""")
_SOURCE_MAP = re.compile(rb"\n?//# sourceMappingURL=\S+\s*\Z")


class Refused(Exception):
    """A package or a file is not the pinned one."""


def verify(name: str, archive: bytes, integrity: str) -> None:
    """Raise Refused unless the archive has this subresource integrity."""
    algorithm, _, expected = integrity.partition("-")
    found = base64.b64encode(hashlib.new(algorithm, archive).digest()).decode()
    if found != expected:
        raise Refused(f"{name}: the archive has {algorithm}-{found}, and {integrity} is pinned")


def kept_files(package: Package, archive: bytes) -> dict[str, bytes]:
    """The files of the package that the console uses, as it uses them."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        found = {}
        for name, path in package.files.items():
            member = opened.extractfile(f"package/{path}")
            if member is None:
                raise Refused(f"{path} is no file of the package")
            found[name] = for_the_page(name, member.read())
    return found


def for_the_page(name: str, content: bytes) -> bytes:
    """A module that imports preact by its path, without the name of its source map, which is not served."""
    if not name.endswith(".js"):
        return content
    return _SOURCE_MAP.sub(b"\n", _BARE_IMPORT.sub(rb"\1./preact.module.js\2", content))


def mistakes(folder: Path) -> list[str]:
    """List how the files of the folder differ from its manifest, and the manifest from PACKAGES."""
    manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text("utf-8"))
    pinned = {name: (package.version, package.integrity) for name, package in PACKAGES.items()}
    written = {name: (entry["version"], entry["integrity"]) for name, entry in manifest.items()}
    found = [] if pinned == written else [f"{MANIFEST} has {written}, and the script pins {pinned}"]
    sums = {name: sum_ for entry in manifest.values() for name, sum_ in entry["sha256"].items()}
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    found += [f"{name} is not in {MANIFEST}" for name in sorted(present - set(sums))]
    found += [f"{name} is missing" for name in sorted(set(sums) - present)]
    for name in sorted(present & set(sums)):
        if (sum_ := hashlib.sha256((folder / name).read_bytes()).hexdigest()) != sums[name]:
            found.append(f"{name} has the SHA-256 {sum_}, and {MANIFEST} says {sums[name]}")
    return found


def refresh(folder: Path, registry: str) -> None:
    """Fetch all packages first, so that a failure leaves the folder unchanged."""
    files: dict[str, bytes] = {}
    manifest = {}
    with httpx.Client(base_url=registry, follow_redirects=True, timeout=60) as client:
        for name, package in PACKAGES.items():
            described = client.get(f"{name}/{package.version}").raise_for_status().json()
            verify(
                name,
                archive := client.get(described["dist"]["tarball"]).raise_for_status().content,
                package.integrity,
            )
            kept = kept_files(package, archive)
            files |= kept
            manifest[name] = {
                "version": package.version,
                "license": described["license"],
                "integrity": package.integrity,
                "sha256": {
                    name: hashlib.sha256(content).hexdigest() for name, content in sorted(kept.items())
                },
            }
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", "utf-8")


def registry_of_npm() -> str:
    done = subprocess.run(["npm", "config", "get", "registry"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the files with versions.json")
    parser.add_argument("--registry", help="the URL of a registry (default: that of npm's configuration)")
    options = parser.parse_args()
    if not options.check:
        try:
            refresh(VENDOR, options.registry or registry_of_npm())
        except Refused as refusal:
            print(refusal, file=sys.stderr)
            return 1
    found = mistakes(VENDOR)
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
