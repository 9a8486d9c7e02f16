"""systemd's own judgement of the units that are printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from msgspec.structs import replace

import llamasup
from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.llama_server.inspect import Runtime
from llamasup.features.systemd.installation import program_paths
from llamasup.features.systemd.systemctl import systemd_version
from llamasup.features.systemd.unit_file import Credential, Unit, unit_text
from tests.e2e.driver import run_to_end
from tests.kit.fake_server import install

pytestmark = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None,
    reason="systemd-analyze is missing (Debian: apt-get install systemd)",
)

LOCAL = Unit(
    "tiny",
    ("/bin/sh", "-c", 'echo "50%" $HOME \\ ;', "--", "--temp", "1"),
    ("/bin/sh", "-c", 'echo "50%" $HOME \\ ;'),
    drain_timeout_s=30.0,
    stop_timeout_s=10.0,
    groups=("video",),
    needed_paths=("/home/a/100% b/x.gguf", "/root/venv"),
    systemd_version=systemd_version(),
)
SYSTEM = {
    "local": LOCAL,
    "for others": replace(
        LOCAL, is_local=False, credentials=(Credential("--api-key-file", "/etc/my keys 100%"),)
    ),
    "of many": replace(
        LOCAL,
        of_many=True,
        downloads=True,
        is_local=False,
        written_folders=("/home/a/my models 100%", "/srv/my models 100%"),
        credentials=(Credential("--token-file", "/etc/token"), Credential("--tls-key", "/etc/key")),
    ),
    "as a named user": replace(
        LOCAL, run_as="daemon", is_local=False, credentials=(Credential("--api-key-file", "/etc/keys"),)
    ),
}
OF_USER = replace(LOCAL, of_user=True, credentials=(Credential("--api-key-file", "/home/a/keys"),))


def analyze(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={
            "PATH": "/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "XDG_RUNTIME_DIR": str(tmp_path),
            "HOME": str(tmp_path),
        },
    )


def written(tmp_path: Path, unit: Unit) -> str:
    path = tmp_path / unit.file_name
    path.write_text(unit_text(unit))
    return str(path)


@pytest.mark.parametrize("unit", SYSTEM.values(), ids=SYSTEM)
def test_systemd_verifies_the_system_unit(tmp_path: Path, unit: Unit) -> None:
    done = analyze(tmp_path, "verify", "--man=no", written(tmp_path, unit))
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_verifies_the_user_unit(tmp_path: Path) -> None:
    done = analyze(tmp_path, "verify", "--user", "--man=no", written(tmp_path, OF_USER))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.check("X14")
@pytest.mark.parametrize("unit", SYSTEM.values(), ids=SYSTEM)
def test_exposure_is_at_most_1_5(tmp_path: Path, unit: Unit) -> None:
    done = analyze(tmp_path, "security", "--offline=true", "--threshold=15", written(tmp_path, unit))
    found = re.search(r"exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stderr
    print(f"exposure: {found[1]}")
    assert float(found[1]) <= 1.5
    assert done.returncode == 0


def test_systemd_verifies_the_printed_unit(tmp_path: Path, tiny_model: Path) -> None:
    model = tmp_path / "100% of $HOME é.gguf"
    model.write_bytes(tiny_model.read_bytes())
    done = run_to_end("service", "print", str(model), "--runtime", "embedded", "--", "--temp", "0.5")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "llamasup-printed.service"
    path.write_text(done.stdout)
    checked = analyze(tmp_path, "verify", "--man=no", str(path))
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "WantedBy=multi-user.target" in done.stdout


def test_unit_reads_the_folder_of_the_package_and_none_above_it() -> None:
    """A checkout may be in a home, which a service must not see."""
    runtime = Runtime("binary", "/opt/llama/llama-server", ("llama-server",), Capabilities("1", (), ()))
    package = Path(str(llamasup.__file__)).parent
    assert package.parent in program_paths(runtime)
    assert not {package.parents[1], package.parents[2]} & set(program_paths(runtime))


def test_systemd_verifies_the_unit_of_many_models(tmp_path: Path, tiny_model: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "100% of $HOME é").mkdir()
    (tmp_path / "100% of $HOME é/m.gguf").write_bytes(tiny_model.read_bytes())
    config = tmp_path / "config.yaml"
    config.write_text(
        "models_dir: 100% of $HOME é\n"
        "downloads: {on_demand: true, folder: fetched here}\n"
        "http: {access_log: -}\n"
    )
    (tmp_path / "fetched here").mkdir()
    arguments = ("--config", str(config), "--runtime", "embedded", "--run-as", "daemon")
    done = run_to_end("service", "print", *arguments)
    assert done.returncode == 0, done.stderr
    assert f'BindPaths="-{tmp_path}/fetched here"' in done.stdout
    path = tmp_path / "llamasup-printed.service"
    path.write_text(done.stdout)
    checked = analyze(tmp_path, "verify", "--man=no", str(path))
    assert (checked.returncode, checked.stderr) == (0, "")
    rated = analyze(tmp_path, "security", "--offline=true", "--threshold=15", str(path))
    assert rated.returncode == 0, rated.stdout


def test_unit_leaves_a_watched_link_to_the_config(tmp_path: Path, tiny_model: Path) -> None:
    tmp_path.chmod(0o755)
    config, model = tmp_path / "config.yaml", tmp_path / "m.gguf"
    model.write_bytes(tiny_model.read_bytes())
    with TemporaryDirectory(dir="/opt") as folder:  # the sandbox hides /tmp
        Path(folder).chmod(0o755)
        link = Path(folder) / "current"
        link.symlink_to(install(Path(folder) / "build"))
        commands = {watch: unit_of(config, model, link, watch=watch) for watch in (False, True)}
    assert f"--runtime {link}" in commands[False].stdout
    assert "--runtime" not in commands[True].stdout
    hidden = tmp_path / "current"
    hidden.symlink_to(install(tmp_path / "build"))
    assert "a service cannot follow" in unit_of(config, model, hidden, watch=True).stderr


def unit_of(config: Path, model: Path, runtime: Path, *, watch: bool) -> subprocess.CompletedProcess[str]:
    keys = {"runtime": {"path": str(runtime), "watch": watch}, "models": {"m": {"path": str(model)}}}
    config.write_text(json.dumps(keys))
    return run_to_end("service", "print", "--config", str(config), "--run-as", "daemon")
