"""List the contents of a bundle: the texts of its licenses, and its SBOM (CycloneDX, JSON)."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution, requires
from pathlib import Path, PurePath

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from license_texts import LicenseTexts
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["needed_by", "write_inventory"]

_SCHEMA = SchemaVersion.V1_6
_HERE = Path(__file__).parent
_CONSOLE = Path("_internal/llamasup/features/console/static/assets/vendor")
# Names of the files with the texts of licenses, in lower case.
_LICENSE_WORDS = ("license", "licence", "copying", "notice", "copyright")


def needed_by(name: str, extras: set[str]) -> set[str]:
    """Return the canonical names of ``name`` and of all that it needs here, with these extras."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(canonicalize_name(name))
        for line in requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed.name, more) for more in ("", *needed.extras)]
    return found


def write_inventory(
    folder: Path,
    distributions: Sequence[str],
    libraries: Sequence[tuple[str, str]],
    given_licenses: Path | None,
) -> Sequence[str]:
    """Write ``licenses/`` and ``sbom.json`` into ``folder``. Returns what has no text of its license.

    ``libraries``: the name in the bundle and the source of each shared library that comes from the system.
    ``given_licenses``: a folder with NAME.txt for what has no text on this machine.
    """
    texts = LicenseTexts(folder / "licenses", given_licenses)
    found = [distribution(name) for name in distributions]
    components = [_package(item, texts.folder) for item in found]
    components += [_python(texts), *(_library(name, Path(source), texts) for name, source in libraries)]
    components += _scripts_of_console(folder / _CONSOLE, texts.folder)
    if "xllamacpp" in distributions:
        components.append(_llama_cpp(texts))
    own = distribution("llamasup")
    bom = Bom(components=[entry for entry in components if entry is not None])
    bom.metadata.component = Component(
        name="llamasup",
        version=own.version,
        type=ComponentType.APPLICATION,
        licenses=[LicenseFactory().make_from_string(_license_name(own))],
        purl=PackageURL("pypi", name="llamasup", version=own.version),
    )
    bom.register_dependency(bom.metadata.component, bom.components)
    texts.add("llamasup", [_HERE.parents[1] / "LICENSE"])
    text = make_outputter(bom, OutputFormat.JSON, _SCHEMA).output_as_string(indent=1)
    if (problem := JsonStrictValidator(_SCHEMA).validate_str(text)) is not None:
        raise ValueError(f"The SBOM is invalid: {problem}")
    (folder / "sbom.json").write_text(text + "\n", "utf-8")
    return texts.missing


def _package(found: Distribution, licenses: Path) -> Component:
    name = found.metadata["Name"]
    texts = list(_license_files(found))
    into = licenses / f"{name}-{found.version}"
    into.mkdir()
    for name_in_package, text in texts:
        shutil.copy(text, into / name_in_package)
    if not texts:
        said = f"{name} {found.version} contains no text of its license. It says: {_license_name(found)}\n"
        (into / "LICENSE.txt").write_text(said, "utf-8")
    return Component(
        name=name,
        version=found.version,
        licenses=[LicenseFactory().make_from_string(_license_name(found))],
        purl=PackageURL("pypi", name=name.lower().replace("_", "-"), version=found.version),
    )


def _license_files(found: Distribution) -> Iterator[tuple[str, Path]]:
    """Each with a name of its own: a package may have several, in folders."""
    for file in found.files or ():
        in_metadata = file.parts[0].endswith(".dist-info")
        if in_metadata and file.name.lower().startswith(_LICENSE_WORDS):
            yield "-".join(file.parts[1:]).removeprefix("licenses-"), Path(str(found.locate_file(file)))


def _license_name(found: Distribution) -> str:
    metadata = found.metadata
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in metadata.get_all("Classifier", [])
        if line.startswith("License")
    ]
    names = [metadata.get("License-Expression"), metadata.get("License"), *classifiers]
    return next((name.splitlines()[0] for name in names if name and name != "UNKNOWN"), "unknown")


def _python(texts: LicenseTexts) -> Component:
    version = platform.python_version()
    of_debian = Path(f"/usr/share/doc/python{sysconfig.get_python_version()}/copyright")
    of_windows = Path(sys.base_prefix) / "LICENSE.txt"
    texts.add(
        f"Python-{version}", [Path(sysconfig.get_path("stdlib")) / "LICENSE.txt", of_windows, of_debian]
    )
    return Component(
        name="Python",
        version=version,
        licenses=[LicenseFactory().make_from_string("PSF-2.0")],
        purl=PackageURL("generic", name="python", version=version),
    )


def _scripts_of_console(vendor: Path, licenses: Path) -> Iterator[Component]:
    """List the packages of npm: scripts/vendor_console.py has copied them, with their licenses."""
    for name, found in json.loads((vendor / "versions.json").read_text("utf-8")).items():
        into = licenses / f"{name}-{found['version']}"
        into.mkdir()
        for file in found["sha256"]:
            if file.startswith("LICENSE"):
                shutil.copy(vendor / file, into)
        yield Component(
            name=name,
            version=found["version"],
            licenses=[LicenseFactory().make_from_string(found["license"])],
            purl=PackageURL("npm", name=name, version=found["version"]),
        )


def _llama_cpp(texts: LicenseTexts) -> Component:
    """Part of the wheel of xllamacpp, which does not have its license. Its version ends with the build."""
    texts.add("llama.cpp", [_HERE / "licenses" / "llama.cpp.txt"])
    build = f"b{distribution('xllamacpp').version.rpartition('.')[2]}"
    return Component(
        name="llama.cpp",
        version=build,
        licenses=[LicenseFactory().make_from_string("MIT")],
        purl=PackageURL("github", "ggml-org", "llama.cpp", build),
    )


def _library(name: str, source: Path, texts: LicenseTexts) -> Component | None:
    """A library of this system; None for Python's own."""
    if PurePath(name).name.startswith(("libpython", "python3")):
        return None
    # Python for Windows brings its libraries and those of Microsoft, and its license has the texts of theirs.
    of_python = (Path(sys.base_prefix), Path(sys.base_prefix) / "DLLs")
    is_of_python = sys.platform == "win32" and source.parent in of_python
    package = None if is_of_python else _debian_package(source.resolve())
    if not is_of_python:
        texts.add_debian_package(PurePath(name).name, package[0] if package else None)
    return Component(
        name=PurePath(name).name,
        version=package[1] if package else None,
        hashes=[HashType.from_hashlib_alg("sha256", hashlib.sha256(source.read_bytes()).hexdigest())],
        purl=PackageURL("deb", _system(), *package) if package else None,
    )


def _debian_package(path: Path) -> tuple[str, str] | None:
    """The name and version of the Debian package that owns ``path``."""
    for spelling in (path, Path("/", *path.parts[2:])):  # /usr/lib was /lib
        asked = ["dpkg-query", "--search", str(spelling)]
        try:
            owner = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(":")[0]
            asked = ["dpkg-query", "--show", "--showformat", "${Version}\n", owner]
            shown = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        return owner, shown.splitlines()[0]
    return None


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["ID"]
    except OSError:
        return "debian"
