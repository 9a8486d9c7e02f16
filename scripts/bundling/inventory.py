"""What a bundle contains: the texts of its licenses, and its SBOM (CycloneDX, JSON)."""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path, PurePath

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

__all__ = ["write_inventory"]

_SCHEMA = SchemaVersion.V1_6
_HERE = Path(__file__).parent
# Names of the files with the texts of licenses, in lower case.
_LICENSE_WORDS = ("license", "licence", "copying", "notice", "copyright")


def write_inventory(folder: Path, distributions: Sequence[str], libraries: Sequence[tuple[str, str]]) -> None:
    """Write ``licenses/`` and ``sbom.json`` into ``folder``.

    ``libraries``: the name in the bundle and the source of each shared library that comes from the system.
    """
    licenses = folder / "licenses"
    licenses.mkdir()
    found = [distribution(name) for name in distributions]
    components = [_package(item, licenses) for item in found]
    components += [_python(licenses), *(_library(name, Path(source), licenses) for name, source in libraries)]
    if "xllamacpp" in distributions:
        components.append(_llama_cpp(licenses))
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
    shutil.copy(_HERE.parents[1] / "LICENSE", licenses / "llamasup.txt")
    text = make_outputter(bom, OutputFormat.JSON, _SCHEMA).output_as_string(indent=1)
    if (problem := JsonStrictValidator(_SCHEMA).validate_str(text)) is not None:
        raise ValueError(f"The SBOM is invalid: {problem}")
    (folder / "sbom.json").write_text(text + "\n", "utf-8")


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


def _python(licenses: Path) -> Component:
    version = platform.python_version()
    text = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if not text.exists():  # Debian's Python
        text = Path(f"/usr/share/doc/python{sysconfig.get_python_version()}/copyright")
    shutil.copy(text, licenses / f"Python-{version}.txt")
    return Component(
        name="Python",
        version=version,
        licenses=[LicenseFactory().make_from_string("PSF-2.0")],
        purl=PackageURL("generic", name="python", version=version),
    )


def _llama_cpp(licenses: Path) -> Component:
    """Part of the wheel of xllamacpp, which does not have its license. Its version ends with the build."""
    shutil.copy(_HERE / "licenses" / "llama.cpp.txt", licenses)
    build = f"b{distribution('xllamacpp').version.rpartition('.')[2]}"
    return Component(
        name="llama.cpp",
        version=build,
        licenses=[LicenseFactory().make_from_string("MIT")],
        purl=PackageURL("github", "ggml-org", "llama.cpp", build),
    )


def _library(name: str, source: Path, licenses: Path) -> Component | None:
    """A library of this system; None for Python's own."""
    if PurePath(name).name.startswith("libpython"):
        return None
    package = _debian_package(source.resolve())
    copyright_ = Path("/usr/share/doc") / package[0] / "copyright" if package else None
    if copyright_ is not None and copyright_.exists():
        shutil.copy(copyright_, licenses / f"{package[0]}.txt")
    else:
        print(f"The license of {name} ({source}) is not known here: add it.", file=sys.stderr)
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
