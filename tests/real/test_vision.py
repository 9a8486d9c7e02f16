"""Chats with images: llamasup finds a generated projector in the folder of the tiny model, and passes it."""

from __future__ import annotations

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamasup import serve
from tests.e2e.driver import Llamasup, llamasup, run_to_end, wrapped
from tests.kit import models, vision


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model and its projector, with usual file names."""
    own = tmp_path / "models"
    own.mkdir()
    shutil.copy(tiny_model, own / "tiny-F32.gguf")
    (own / "mmproj-F16.gguf").write_bytes(vision.vision_projector())
    return own


def chat(running: Llamasup, *parts: dict[str, Any]) -> httpx.Response:
    message = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, *parts]}
    body = {"messages": [message], "max_tokens": 8, "temperature": 0, "cache_prompt": False}
    return httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)


def image(content: bytes | None = None) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": vision.picture_url(content)}}


@pytest.mark.contract
def test_chat_about_an_image_uses_the_projector_in_the_folder(runtime: str, folder: Path) -> None:
    red = vision.picture(colour=lambda _x, _y: (255, 0, 0))
    with llamasup(folder / "tiny-F32.gguf", "--runtime", runtime) as running:
        without_image, with_image, other = chat(running), chat(running, image()), chat(running, image(red))
        both = chat(running, image(), image(red))
        models_said = httpx.get(f"{running.url}/v1/models").json()
        assert running.stop() == 0

    assert [answer.status_code for answer in (without_image, with_image, other, both)] == [200] * 4, (
        with_image.text
    )
    tokens = [answer.json()["usage"]["prompt_tokens"] for answer in (without_image, with_image, both)]
    said = [
        answer.json()["choices"][0]["message"]["content"] for answer in (without_image, with_image, other)
    ]
    print(f"prompt tokens without, with one and with two images: {tokens}; said {said}")
    assert tokens[1] == tokens[0] + vision.IMAGE_TOKENS
    assert tokens[2] == tokens[1] + vision.IMAGE_TOKENS
    assert len(set(said)) == 3  # the answer depends on the images
    assert "multimodal" in models_said["models"][0]["capabilities"]


@pytest.mark.one_runtime
@pytest.mark.parametrize("arguments", [("--mmproj", "none"), ("--", "--no-mmproj")])
def test_no_projector_is_passed_with_mmproj_none(
    arguments: tuple[str, ...], runtime: str, folder: Path
) -> None:
    with llamasup(folder / "tiny-F32.gguf", "--runtime", runtime, *arguments) as running:
        assert chat(running).status_code == 200
        refused = chat(running, image())
        assert running.stop() == 0
    assert refused.status_code == 500
    assert "image input is not supported" in refused.text


def test_requested_projector_replaces_the_one_in_the_folder(
    llama_server: str, folder: Path, tmp_path: Path
) -> None:
    requested_paths = tmp_path / "another.gguf"
    requested_paths.write_bytes(vision.vision_projector())
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF, but broken")
    for arguments in (("--mmproj", str(requested_paths)), ("--", "--mmproj", str(requested_paths))):
        with llamasup(folder / "tiny-F32.gguf", "--runtime", llama_server, *arguments) as running:
            assert chat(running, image()).status_code == 200
            assert running.stop() == 0


def test_requested_projector_of_wrong_width_is_refused_and_a_found_one_ignored(
    runtime: str, folder: Path, tiny_model: Path
) -> None:
    wrong = folder / "mmproj-F16.gguf"
    wrong.write_bytes(vision.vision_projector(48))
    refused = run_to_end("run", str(tiny_model), "--port", "0", "--runtime", runtime, "--mmproj", str(wrong))
    assert refused.returncode == 65
    assert "--mmproj mmproj-F16.gguf is for models of width 48, and this model has width 64" in refused.stderr

    planned = run_to_end("plan", str(folder / "tiny-F32.gguf"), "--runtime", runtime)
    assert planned.returncode == 0
    assert "is for models of width 48, and this model has width 64" in planned.stdout
    with llamasup(folder / "tiny-F32.gguf", "--runtime", runtime) as running:
        assert chat(running).status_code == 200
        assert running.stop() == 0


def test_projector_beside_two_models_is_matched_by_its_name(llama_server: str, folder: Path) -> None:
    (folder / "other-F32.gguf").write_bytes(models.other_vocabulary())
    planned = run_to_end("plan", str(folder / "tiny-F32.gguf"), "--runtime", llama_server)
    assert "mmproj-F16.gguf may belong to this model or to other-F32.gguf" in planned.stdout
    assert "--mmproj none" in planned.stdout

    (folder / "mmproj-F16.gguf").rename(folder / "mmproj-tiny-F16.gguf")
    planned = run_to_end("plan", str(folder / "tiny-F32.gguf"), "--runtime", llama_server)
    assert f"--mmproj {folder / 'mmproj-tiny-F16.gguf'}" in planned.stdout
    planned = run_to_end("plan", str(folder / "other-F32.gguf"), "--runtime", llama_server)
    assert "--mmproj " + str(folder) not in planned.stdout


def test_encoder_embeds_images(runtime: str, folder: Path) -> None:
    (folder / "encoder.gguf").write_bytes(models.tiny_encoder())
    arguments = ("--runtime", runtime, "--mmproj", str(folder / "mmproj-F16.gguf"))
    with llamasup(folder / "encoder.gguf", *arguments) as running:
        marker = httpx.get(f"{running.url}/props").json()["media_marker"]

        def embedded(picture: bytes | None) -> Any:
            image = vision.picture_url(picture).partition(",")[2]
            content = {"prompt_string": f"see {marker}", "multimodal_data": [image]}
            answer = httpx.post(f"{running.url}/embeddings", json={"content": content}, timeout=60)
            if "Failed to tokenize prompt" in answer.text:
                pytest.skip("this build (such as b10068) embeds no images")
            assert answer.status_code == 200, answer.text
            return answer.json()[0]["embedding"]

        red = vision.picture(colour=lambda _x, _y: (255, 0, 0))
        assert embedded(None) == embedded(None) != embedded(red)
        assert running.stop() == 0


@pytest.mark.one_runtime
def test_projector_for_a_reranker_is_refused(runtime: str, folder: Path) -> None:
    (folder / "reranker.gguf").write_bytes(models.tiny_reranker())
    arguments = ("--port", "0", "--runtime", runtime, "--mmproj", str(folder / "mmproj-F16.gguf"))
    refused = run_to_end("run", str(folder / "reranker.gguf"), *arguments)
    assert refused.returncode == 2
    assert "a reranker reads only text" in refused.stderr


# --- media by URL


class Listener:
    """Serves one picture at every path, and records the requested paths."""

    def __init__(self) -> None:
        self.requested_paths: list[str] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listener.requested_paths.append(self.path)
                content = vision.picture()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Listener:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def bodies_with(url: str) -> list[tuple[str, str]]:
    """Paths and bodies with ``url``: of each API, and in spellings that only a JSON parser decodes."""
    text = {"type": "text", "text": "What is it?"}
    of_chat = {"type": "image_url", "image_url": {"url": url}}
    of_messages = {"type": "image", "source": {"type": "url", "url": url}}
    in_response = {"role": "user", "content": [{"type": "input_image", "image_url": url}]}
    message = {"role": "user", "content": [text, of_messages]}
    said = json.dumps({"messages": [{"role": "user", "content": [text, of_chat]}], "max_tokens": 1})
    padded = json.dumps(
        {"messages": [{"role": "user", "content": [text, of_chat]}], "max_tokens": 1, "user": "a" * 200_000}
    )
    return [
        ("/v1/chat/completions", said),
        ("/v1/chat/completions", said.replace("http", "\\u0068\\u0074tp").replace("/", "\\/")),
        ("/v1/chat/completions", said.replace('"url"', '"u\\u0072l"')),
        ("/v1/chat/completions", said.replace('{"url"', '{"url": "data:,", "url"')),
        ("/v1/chat/completions", padded),
        ("/v1/messages", json.dumps({"messages": [message], "max_tokens": 1})),
        ("/v1/responses", json.dumps({"input": [in_response], "max_output_tokens": 1})),
        ("/apply-template", said),
        ("/v1/messages/count_tokens", json.dumps({"messages": [message]})),
        ("/v1/chat/completions/input_tokens", said),
    ]  # fmt: skip


@pytest.mark.check("X7", "400 remote_media, no connection")
def test_media_urls_are_fetched_only_from_allowed_hosts(runtime: str, folder: Path) -> None:
    statuses: dict[str, list[int]] = {}
    fetched: dict[str, int] = {}
    for allowed in ("", "other.example", "any", "the listener's"):
        with Listener() as listener:
            host = listener.host if allowed == "the listener's" else allowed
            options = ("--remote-media", host) if host else ()
            with llamasup(folder / "tiny-F32.gguf", "--runtime", runtime, *options) as running:
                answers = [
                    httpx.post(
                        running.url + path,
                        content=body,
                        headers={"Content-Type": "application/json"},
                        timeout=60,
                    )
                    for path, body in bodies_with(f"http://{listener.host}/latest/meta-data/")
                ]
                assert chat(running, image()).status_code == 200  # a data: URL
                assert running.stop() == 0
        statuses[allowed] = [answer.status_code for answer in answers]
        fetched[allowed] = len(listener.requested_paths)
        if fetched[allowed] == 0:
            assert {answer.json()["error"]["cause"] for answer in answers} == {"remote_media"}
    print(f"fetched: {fetched}; {statuses}")
    count = len(statuses[""])
    assert fetched == {"": 0, "other.example": 0, "any": count, "the listener's": count}
    assert statuses[""] == statuses["other.example"] == [400] * count
    assert statuses["any"] == statuses["the listener's"] == [200] * count


@pytest.mark.one_runtime
@pytest.mark.parametrize("remote_media", [False, True, "listener"])
def test_config_sets_which_media_urls_serve_passes_on(
    runtime: str, folder: Path, remote_media: bool | str
) -> None:
    with Listener() as listener:
        url = f"http://{listener.host}/x.png"
        hosts = listener.host if remote_media == "listener" else remote_media
        tiny = {"path": str(folder / "tiny-F32.gguf"), "mmproj": str(folder / "mmproj-F16.gguf")}
        config = {"models": {"tiny": tiny}, "http": {"remote_media": hosts}}
        with serve(config=config, runtime=runtime) as server:
            message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
            body = {"model": "tiny", "messages": [message], "max_tokens": 1}
            answer = server.client.post("/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, listener.requested_paths) == (
        (200, ["/x.png"]) if remote_media else (400, [])
    )


@pytest.mark.parametrize("strict", [False, True])
def test_wrap_passes_media_urls_unless_strict(llama_server: str, folder: Path, strict: bool) -> None:
    words = (llama_server, "-m", str(folder / "tiny-F32.gguf"), "--mmproj", str(folder / "mmproj-F16.gguf"))
    options = ("--strict",) if strict else ()
    with (
        Listener() as listener,
        wrapped(*words, "--port", "0", "-c", "512", options=options) as running,
    ):
        answer = chat(running, {"type": "image_url", "image_url": {"url": f"http://{listener.host}/x.png"}})
        assert running.stop() == 0
    assert (answer.status_code, listener.requested_paths) == ((400, []) if strict else (200, ["/x.png"]))
