"""Makes the bundle with PyInstaller, adds its licenses and its SBOM, and checks its size: scripts/bundle."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from inventory import write_inventory
from license_texts import refusal

ROOT = Path(__file__).resolve().parents[2]
# Measured on Debian 12 (x86-64, Python 3.11): 68 and 41 MiB. A package that comes in by mistake shows here.
MOST_MIB = {"llamasup": 90, "llamasup-without-embedded": 60}
PROGRAM = "llamasup.exe" if sys.platform == "win32" else "llamasup"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bundle", description=__doc__)
    parser.add_argument("--without-embedded", action="store_true", help="leave the embedded runtime out")
    parser.add_argument(
        "--licenses",
        metavar="FOLDER",
        type=Path,
        help="has NAME.txt for each part whose license is unknown on this machine",
    )
    parser.add_argument(
        "--folder", metavar="FOLDER", type=Path, default=ROOT / "dist", help="where to make it (dist)"
    )
    options = parser.parse_args()
    without_embedded = options.without_embedded
    name = "llamasup-without-embedded" if without_embedded else "llamasup"
    folder, work = options.folder / name, options.folder / ".work" / name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    began = time.monotonic()
    contents = freeze(work, without_embedded=without_embedded)
    made = work / "dist" / "llamasup"
    missing = write_inventory(made, contents["distributions"], contents["libraries"], options.licenses)
    if missing:
        message, code = refusal(missing, options.licenses)
        print(message, file=sys.stderr)
        sys.exit(code)
    subprocess.run([made / PROGRAM, "--version"], check=True, stdout=subprocess.DEVNULL)
    size_mib = sum(path.lstat().st_size for path in made.rglob("*") if not path.is_dir()) / 2**20
    most = MOST_MIB[name]
    print(f"{size_mib:.1f} MiB (at most {most}), made in {time.monotonic() - began:.0f} s", file=sys.stderr)
    if size_mib > most:
        sys.exit(f"The bundle is too large: see what {made} contains, or raise MOST_MIB in {__file__}.")
    if folder.exists():
        folder.rename(work / "before")  # at once: not half of it is left if a file cannot be removed
    made.rename(folder)
    shutil.rmtree(work / "before", ignore_errors=True)
    print(folder / PROGRAM)


def freeze(work: Path, *, without_embedded: bool) -> dict[str, list]:
    contents = work / "contents.json"
    log = work / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "PyInstaller", "--noconfirm"),
                *("--distpath", work / "dist", "--workpath", work / "build"),
                *(ROOT / "scripts" / "bundling" / "llamasup.spec", "--"),
                *("--without-embedded" if without_embedded else "--with-embedded", contents),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYINSTALLER_CONFIG_DIR": str(work / "cache")},
            check=False,
        )
    if done.returncode != 0:
        sys.exit(
            "\n".join([*log.read_text("utf-8", "replace").splitlines()[-20:], f"PyInstaller failed: {log}"])
        )
    return json.loads(contents.read_text("utf-8"))


if __name__ == "__main__":
    main()
