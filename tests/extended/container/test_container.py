"""The image in podman: start, readiness, stop, crashes, limits, volumes and users.

Skipped where podman is missing; with LLAMASUP_REQUIRE_CONTAINER=1 they fail there.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.extended.container.engine import Container, image, reason_to_skip, started
from tests.kit.paths import ROOT
from tests.kit.patience import PATIENCE_S, eventually

pytestmark = pytest.mark.one_runtime
SERVER = "-m llamasup.embedded"


@pytest.fixture(scope="module", autouse=True)
def built_image() -> str:
    if reason := reason_to_skip():
        if os.environ.get("LLAMASUP_REQUIRE_CONTAINER") == "1":
            pytest.fail(f"{reason}, and LLAMASUP_REQUIRE_CONTAINER is set")
        pytest.skip(reason)
    return image()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    shutil.copy(ROOT / "llamasup" / "core" / "gguf" / "trained" / "demo.gguf", folder)
    return folder


@pytest.fixture(scope="module")
def container(built_image: str, models: Path) -> Iterator[Container]:
    """One for the tests that leave it as it was."""
    with started(models) as container:
        container.wait_until_healthy()
        yield container


def test_healthy_container_answers_as_a_user_without_rights(container: Container) -> None:
    assert container.answer()
    assert container.run("id", "-u").strip() == "1000"
    (first, *_) = container.processes()
    assert (first[0], first[2].split()[:3]) == (1, ["tini", "--", "llamasup"])
    assert json.loads(container.run("llamasup", "ps", "--json"))


def test_crash_inside_is_repaired(container: Container) -> None:
    assert container.answer()
    (pid,) = [pid for pid, _, command in container.processes() if SERVER in command]
    container.run("python3", "-c", f"import os; os.kill({pid}, 9)")
    assert container.answer()
    (again,) = [other for other, _, command in container.processes() if SERVER in command]
    assert again != pid
    assert container.is_running()


def test_orphans_are_removed(container: Container) -> None:
    container.run("sh", "-c", "(sh -c 'exit 3' & ) ; (sleep 0.2 & )")
    eventually(lambda: all(state != "Z" for _, state, _ in container.processes()), "no zombie", every_s=0.2)
    eventually(lambda: not any("sleep" in line for *_, line in container.processes()), "exit", every_s=0.2)


def test_stop_lets_a_stream_finish(models: Path) -> None:
    with started(models) as container:
        container.wait_until_healthy()
        stream = container.request(stream=True, max_tokens=200)
        assert stream.stdout is not None
        assert stream.stdout.readline().startswith("data: ")
        assert container.stop() == 0, container.logs()
        output, errors = stream.communicate(timeout=PATIENCE_S)
        assert "data: [DONE]" in output, errors
        assert container.logs().rstrip().endswith("stopped")


def test_random_user_with_a_read_only_root_and_no_capabilities(models: Path) -> None:
    options = (
        "--user=54321",
        "--read-only",
        "--tmpfs=/tmp",
        "--cap-drop=all",
        "--security-opt=no-new-privileges",
    )
    with started(models, *options) as container:
        container.wait_until_healthy()
        assert container.answer()
        assert container.run("id", "-u").strip() == "54321"
        assert container.run("ls", "-A", "/state").split()
        assert container.stop() == 0


def test_memory_of_the_container_is_what_models_may_use(models: Path) -> None:
    with started(models, "--memory=400m") as container:
        container.wait_until_healthy()
        assert container.answer()
        (shown,) = [line.split() for line in container.logs().splitlines() if line.startswith("  memory")]
        assert shown[2] == "MiB"
        assert int(shown[1]) < 400


REFUSED = {
    "no key": ([], 78, ["no API key is set", "$LLAMASUP_API_KEY"]),
    "too few processes": (["--pids-limit=6"], 71, ["the limit of processes and threads", "--pids-limit"]),
    "no writable folder": (
        ["--read-only", "--read-only-tmpfs=false"],
        73,
        ["cannot use /tmp", "mount a tmpfs"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_start_says_what_to_do(models: Path, case: str) -> None:
    options, exit_code, parts = REFUSED[case]
    with started(models, *options, key=None if case == "no key" else "secret") as container:
        assert container.wait() == exit_code, container.logs()
        assert all(part in container.logs() for part in parts), container.logs()


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A folder of another user, who keeps it closed."""
    folder = tmp_path / "closed"
    folder.mkdir()
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    os.chown(folder, 4711, 4711)
    folder.chmod(0o700)
    return folder


def test_models_of_another_owner_are_named(closed: Path) -> None:
    with started(closed) as container:
        container.wait_until_healthy()
        assert "/models: may not be read (Permission denied)" in container.logs()


def test_state_of_another_owner_is_said_and_requests_are_served(models: Path, closed: Path) -> None:
    with started(models, "--volume", f"{closed}:/state") as container:
        container.wait_until_healthy()
        assert container.answer()
        assert "Set HOME or XDG_STATE_HOME to a folder that only you can access" in container.logs()
