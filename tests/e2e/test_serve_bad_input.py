"""``llamasup serve`` with bad input: each case has a defined outcome and ends no other model."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.driver import PATIENCE_S, Llamasup, run_to_end, started
from tests.kit.gguf_writer import TensorPlan, write_gguf
from tests.kit.patience import eventually

CHAT = {"prompt": "Hi", "max_tokens": 4}


@contextmanager
def serve(*arguments: str, **options: Any) -> Iterator[Llamasup]:
    """Stopped afterwards, kindly."""
    with started("serve", *arguments, **options) as running:
        yield running
        if running.process.poll() is None:
            assert running.stop() == 0


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    """With two models."""
    made = tmp_path / "models"
    made.mkdir()
    for name in ("alpha", "beta"):
        (made / f"{name}.gguf").write_bytes(tiny_model.read_bytes())
    return made


@pytest.fixture
def config(tmp_path: Path, folder: Path, fake_server: Callable[..., str]) -> Path:
    """Over that folder."""
    path = tmp_path / "llamasup.yaml"
    path.write_text(f"listen: 127.0.0.1:0\nruntime: {fake_server()}\nmodels_dir: {folder}\n")
    return path


def client_of(running: Llamasup) -> httpx.Client:
    return httpx.Client(base_url=running.url, timeout=PATIENCE_S)


def ask(client: httpx.Client, model: str) -> httpx.Response:
    return client.post("/v1/completions", json={"model": model, **CHAT})


def listed(client: httpx.Client) -> list[str]:
    return [item["id"] for item in client.get("/v1/models").raise_for_status().json()["data"]]


# --- names


def test_unknown_name_is_refused_with_similar_names(config: Path) -> None:
    with serve("--config", str(config)) as running, client_of(running) as client:
        refused = ask(client, "alhpa")

        assert refused.status_code == 404
        assert "alpha" in str(refused.json()["error"])
        assert ask(client, "alpha").status_code == 200


def test_path_is_never_the_name_of_a_model(config: Path, folder: Path) -> None:
    with serve("--config", str(config)) as running, client_of(running) as client:
        for name in ("../alpha", "a/../../alpha", "/etc/passwd", "alpha.gguf/..", "%2e%2e/alpha"):
            assert ask(client, name).status_code in {400, 404}, name
            assert listed(client) == ["alpha", "beta"]
            assert running.children() == []
            assert running.process.poll() is None
        assert ask(client, str(folder / "alpha.gguf")).status_code == 404


# --- memory


def test_model_too_large_for_memory_is_refused_at_the_start_with_its_needs(
    tmp_path: Path, folder: Path, fake_server: Callable[..., str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        f"listen: 127.0.0.1:0\nruntime: {fake_server()}\nmemory: {{ram: 1MiB}}\n"
        f"models: {{alpha: {{path: {folder}/alpha.gguf}}}}\n"
    )

    ended = run_to_end("serve", "--config", str(path))

    assert ended.returncode == 71
    assert "alpha" in ended.stderr
    assert "weights" in ended.stderr.lower()
    assert "Traceback" not in ended.stderr


def test_reload_with_a_too_large_model_is_refused_and_changes_nothing(
    tmp_path: Path, folder: Path, fake_server: Callable[..., str]
) -> None:
    """S16."""
    path = tmp_path / "c.yaml"
    sound = (
        f"listen: 127.0.0.1:0\nruntime: {fake_server()}\nmemory: {{ram: 1GiB}}\n"
        f"models:\n  alpha: {{path: {folder}/alpha.gguf, ctx_size: 512, parallel: 1}}\n"
    )
    path.write_text(sound)
    longer = '["--override-kv", "llama.context_length=int:8000000"]'
    with serve("--config", str(path)) as running, client_of(running) as client:
        assert ask(client, "alpha").status_code == 200
        before = [child.pid for child in running.children()]
        for more, why in (
            (
                f"  big: {{path: {folder}/beta.gguf, ctx_size: 8000000, parallel: 1, extra: {longer}}}\n",
                "big",
            ),
            (f"  gone: {{path: {folder}/gamma.gguf}}\n", "gamma.gguf"),
            ("  alpha: {path: x}\n", "duplicate key"),
            ("  - nonsense\n", ""),
        ):
            path.write_text(sound + more)
            refused = run_to_end("reload")

            assert refused.returncode == 78, refused.stderr
            assert why in refused.stderr
            assert "Traceback" not in refused.stderr
            assert listed(client) == ["alpha"]
            assert ask(client, "alpha").status_code == 200
        path.write_text(sound)
        assert run_to_end("reload").returncode == 0

        assert [child.pid for child in running.children()] == before


def test_reload_of_an_invalid_config_returns_the_config_error(
    tmp_path: Path, folder: Path, config: Path, own_folders: Path
) -> None:
    """S16: 400, its exit code, a line for each mistake; and the old one stays in use."""
    sound = config.read_text()
    with serve("--config", str(config)) as running, client_of(running) as client:
        (socket,) = (own_folders / "run" / "llamasup").glob("*/control.sock")
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://localhost", timeout=PATIENCE_S
        ) as control:
            config.write_text(f"{sound}defaults:\n  ctx_size: many\n  extra: [--host, x]\nnonsense: 1\n")
            refused = control.post("/llamasup/v1/reload")
            config.write_text(f"{sound}defaults:\n  ctx_size: 1024\n  extra: [--host, x]\n")
            flags = control.post("/llamasup/v1/reload")
            assert ask(client, "alpha").status_code == 200
            config.write_text(sound)
            assert control.post("/llamasup/v1/reload").status_code == 200

    assert refused.status_code == flags.status_code == 400
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert (error["cause"], error["exit_code"]) == ("config_invalid", 78)
    assert any(line.startswith(f"{config}:5: defaults.ctx_size: ") for line in error["details"])
    assert any(line.startswith(f"{config}:7: nonsense: ") for line in error["details"])
    assert "defaults.extra: --host is not allowed after --" in flags.json()["error"]["details"][0]


def test_invalid_missing_or_unreadable_config_changes_nothing(config: Path) -> None:
    with serve("--config", str(config)) as running, client_of(running) as client:
        assert ask(client, "alpha").status_code == 200
        for content in (b"\xff\xfe\x00", b"\x00" * 100, b"models: {a: {path: demo}", b"# nothing"):
            config.write_bytes(content)
            assert run_to_end("reload").returncode == 78, content
            assert ask(client, "alpha").status_code == 200
        os.kill(running.pid, signal.SIGHUP)
        running.wait_for("config", ok=False)
        assert ask(client, "alpha").status_code == 200
        config.unlink()
        assert run_to_end("reload").returncode == 78
        config.mkdir()
        assert run_to_end("reload").returncode == 78
        assert ask(client, "beta").status_code == 200


# --- folders


def test_models_of_a_disappeared_folder_stay(config: Path, folder: Path, tiny_model: Path) -> None:
    """Loaded models keep serving, also after a reload. When the folder is back, its new models are served."""
    with serve("--config", str(config)) as running, client_of(running) as client:
        assert ask(client, "alpha").status_code == 200
        away = folder.rename(folder.with_name("away"))
        assert run_to_end("reload").returncode == 0
        assert listed(client) == ["alpha", "beta"]
        assert ask(client, "alpha").status_code == 200
        failed = ask(client, "beta")
        assert failed.status_code == 503
        assert "beta.gguf" in failed.json()["error"]["message"]

        (away / "gamma.gguf").write_bytes(tiny_model.read_bytes())
        away.rename(folder)
        assert run_to_end("reload").returncode == 0
        assert listed(client) == ["alpha", "beta", "gamma"]
        assert ask(client, "gamma").status_code == 200
        assert run_to_end("load", "beta").returncode == 0


def test_models_found_after_the_start_stay_when_the_folder_disappears(
    config: Path, folder: Path, tiny_model: Path
) -> None:
    with serve("--config", str(config)) as running, client_of(running) as client:
        (folder / "gamma.gguf").write_bytes(tiny_model.read_bytes())
        eventually(lambda: "gamma" in listed(client))
        assert ask(client, "gamma").status_code == 200
        folder.rename(folder.with_name("away"))
        assert run_to_end("reload").returncode == 0

        assert ask(client, "gamma").status_code == 200


# Root may enter everything, except without these two capabilities.
AS_ANYBODY = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv (util-linux)")


@needs_setpriv
def test_models_of_an_unreachable_folder_stay(config: Path, folder: Path, tiny_model: Path) -> None:
    """As below a dead network share: the system reports an error, not a missing folder."""
    inner = folder / "inner"
    inner.mkdir()
    (folder / "alpha.gguf").rename(inner / "alpha.gguf")
    config.write_text(config.read_text().replace(f"models_dir: {folder}", f"models_dir: {inner}"))
    with serve("--config", str(config), prefix=AS_ANYBODY) as running, client_of(running) as client:
        assert ask(client, "alpha").status_code == 200
        try:
            folder.chmod(0)
            eventually(lambda: "may not be read" in running.stderr_text)
            os.kill(running.pid, signal.SIGHUP)
            assert run_to_end("reload").returncode == 0
            assert listed(client) == ["alpha"]
            assert ask(client, "alpha").status_code == 200
            at_start = run_to_end("list", str(inner), prefix=AS_ANYBODY)
            assert (at_start.returncode, "may not be read" in at_start.stderr) == (66, True)
            with serve("--config", str(config), prefix=AS_ANYBODY) as other, client_of(other) as asking:
                assert listed(asking) == []
        finally:
            folder.chmod(0o755)
        (inner / "gamma.gguf").write_bytes(tiny_model.read_bytes())
        eventually(lambda: "gamma" in listed(client))
        assert "Traceback" not in running.stderr_text


@needs_setpriv
def test_models_of_an_unreadable_subfolder_stay(config: Path, folder: Path, tiny_model: Path) -> None:
    sub = folder / "sub"
    sub.mkdir()
    (folder / "alpha.gguf").rename(sub / "alpha.gguf")
    with serve("--config", str(config), prefix=AS_ANYBODY) as running, client_of(running) as client:
        assert ask(client, "alpha").status_code == 200
        sub.chmod(0)
        try:
            (folder / "gamma.gguf").write_bytes(tiny_model.read_bytes())
            eventually(lambda: "gamma" in listed(client))
            assert run_to_end("reload").returncode == 0
            assert set(listed(client)) == {"alpha", "beta", "gamma"}
            assert ask(client, "alpha").status_code == 200
        finally:
            sub.chmod(0o755)


def test_files_that_are_no_models_are_quiet(
    tmp_path: Path, folder: Path, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    (folder / "beta.gguf").rename(tmp_path / "beta.gguf")
    (folder / "beta.gguf").symlink_to(tmp_path / "beta.gguf")
    tensors = [(TensorPlan("double_blocks.0.img_attn.qkv.weight", (64,)), bytes(256))]
    (folder / "flux1-dev-Q4_K_S.gguf").write_bytes(write_gguf({"general.architecture": "flux"}, tensors))
    (folder / "imatrix.gguf").write_bytes(write_gguf({"general.type": "imatrix"}, tensors))
    (folder / "gone.gguf").symlink_to(folder / "blobs" / "gone")
    path = tmp_path / "c.yaml"
    path.write_text(f"listen: 127.0.0.1:0\nruntime: {fake_server()}\nmodels_dir: {folder}\n")
    with serve("--config", str(path)) as running, client_of(running) as client:
        assert listed(client) == ["alpha"]
        assert client.post("/v1/completions", json=CHAT).status_code == 200  # the only model
        assert ask(client, "flux1-dev-Q4_K_S").status_code == 404
        assert "2 files (llamasup status --all shows why)" in " ".join(running.stderr_text.split())
        for quiet in ("flux", "imatrix", "gone.gguf", "beta.gguf"):
            assert quiet not in running.stderr_text
        assert "links to" in ask(client, "beta").text
        path.write_text(f"{path.read_text()}follow_links: true\n")
        assert run_to_end("reload").returncode == 0
        assert listed(client) == ["alpha", "beta"]
        assert ask(client, "beta").status_code == 200


def test_partial_copy_of_a_model_does_not_affect_the_served_one(
    config: Path, folder: Path, tiny_model: Path
) -> None:
    """Neither during the copy, nor by a reload meanwhile, nor once the copy is clearly incomplete."""
    with serve("--config", str(config)) as running, client_of(running) as client:
        assert ask(client, "alpha").status_code == 200
        copy = folder / "backup/alpha.gguf"
        copy.parent.mkdir()
        copy.write_bytes(tiny_model.read_bytes()[:2000])
        assert run_to_end("reload").returncode == 0
        assert str(copy) not in running.stderr_text
        assert ask(client, "alpha").status_code == 200
        os.utime(copy, (1, 1))
        assert run_to_end("reload").returncode == 0
        assert "backup/alpha.gguf" not in running.stderr_text  # llamasup list --all shows it
        assert ask(client, "alpha").status_code == 200
        assert listed(client) == ["alpha", "beta"]

        copy.write_bytes(tiny_model.read_bytes())
        assert run_to_end("reload").returncode == 0
        refused = run_to_end("load", "alpha")
        assert (refused.returncode, ask(client, "alpha").status_code) == (66, 404)
        assert f"so {folder}/alpha.gguf is not served" in refused.stderr
        assert str(folder) not in ask(client, "alpha").text
        assert listed(client) == ["beta", "backup/alpha"]
        assert ask(client, "backup/alpha").status_code == 200


def test_empty_folder_serves_models_that_are_added_later(
    tmp_path: Path, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    options = ("--models-dir", str(folder), "--port", "0")
    with serve(*options, env=with_runtime(fake_server())) as running, client_of(running) as client:
        assert listed(client) == []
        assert ask(client, "alpha").status_code == 404
        assert client.post("/v1/completions", json=CHAT).status_code == 400

        (folder / "alpha.gguf").write_bytes(tiny_model.read_bytes())
        eventually(lambda: listed(client) == ["alpha"])
        assert ask(client, "alpha").status_code == 200


@pytest.mark.parametrize(("is_file", "said"), [(True, " is a file"), (False, ": there is no such folder")])
def test_folder_on_the_command_line_must_exist(is_file: bool, said: str, tmp_path: Path) -> None:
    path = tmp_path / "models"
    if is_file:
        path.write_text("")
    ended = run_to_end("serve", "--models-dir", str(path), "--port", "0")

    assert ended.returncode == 66
    assert f"{path}{said}" in ended.stderr


def test_folder_of_the_config_may_be_created_later(config: Path, folder: Path) -> None:
    """For example, a disk that is mounted after the start."""
    away = folder.rename(folder.with_name("away"))
    with serve("--config", str(config)) as running, client_of(running) as client:
        assert listed(client) == []
        assert f"{folder}: there is no such folder" in running.stderr_text
        away.rename(folder)
        assert run_to_end("reload").returncode == 0
        assert ask(client, "alpha").status_code == 200


def with_runtime(path: str) -> dict[str, str]:
    """Found as ``llama-server`` on the PATH."""
    folder = Path(path).parent / f"{Path(path).name}-bin"
    folder.mkdir(exist_ok=True)
    (folder / "llama-server").unlink(missing_ok=True)
    (folder / "llama-server").symlink_to(path)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_thousand_models_are_listed_and_cost_no_cpu_while_idle(
    tmp_path: Path, tiny_model: Path, fake_server: Callable[..., str]
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "model-0.gguf").write_bytes(tiny_model.read_bytes())
    for number in range(1, 1000):
        (folder / f"model-{number}.gguf").hardlink_to(folder / "model-0.gguf")
    path = tmp_path / "c.yaml"
    path.write_text(f"listen: 127.0.0.1:0\nruntime: {fake_server()}\nmodels_dir: {folder}\n")
    with serve("--config", str(path)) as running, client_of(running) as client:
        assert len(listed(client)) == 1000
        assert ask(client, "model-999").status_code == 200
        assert ask(client, "model-1000").status_code == 404
        process = psutil.Process(running.pid)
        eventually(lambda: process.cpu_percent(2.0) <= 5.0)
        assert process.num_threads() < 30
        assert len(process.children()) < 5


# --- ports and files


def test_second_serve_on_a_port_is_refused_and_the_first_keeps_serving(config: Path) -> None:
    with serve("--config", str(config)) as running, client_of(running) as client:
        port = running.wait_for("ready")["port"]
        ended = run_to_end("serve", "--config", str(config), "--port", str(port))

        assert ended.returncode == 71
        assert str(port) in ended.stderr
        assert ask(client, "alpha").status_code == 200


def test_broken_file_is_reported_to_its_client_and_affects_no_other_model(config: Path, folder: Path) -> None:
    (folder / "broken.gguf").write_bytes(b"GGUF" + bytes(60))
    with serve("--config", str(config)) as running, client_of(running) as client:
        ended = run_to_end("load", "broken")
        refused = ask(client, "broken")

        assert ended.returncode == 65
        assert "broken.gguf" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert refused.status_code == 503
        assert "broken.gguf" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert ask(client, "alpha").status_code == 200
