"""The API for batches against a scripted server: from the upload to the files of the answers."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import llamasup.features.batch.api.runner as runner_module
import llamasup.features.batch.api.service as service_module
import llamasup.features.batch.api.store as store_module
import llamasup.features.batch.job as job_module
from llamasup.core.auth.api_key import ApiKey
from llamasup.core.auth.key_source import KeyFile
from llamasup.core.auth.keys import Keys
from llamasup.core.http.address import UnixAddress
from llamasup.core.http.errors import error_object
from llamasup.core.settings.units import Size
from llamasup.errors import DiskFull, LlamasupError
from llamasup.features.batch.api.form import UploadForm
from llamasup.features.batch.api.objects import ENDED, StorageLimit, ended, next_batch
from llamasup.features.batch.api.routes import routes_of
from llamasup.features.batch.api.service import BatchService
from llamasup.features.batch.api.store import Store
from llamasup.features.batch.client import Answer, BatchClient
from llamasup.features.batch.index import Index
from llamasup.features.batch.job import Prepared
from llamasup.features.batch.schedule import Refusal
from llamasup.features.batch.settings import Batches
from tests.kit.async_tests import async_test
from tests.kit.patience import PATIENCE_S

T = TypeVar("T")

ANNA, BEN = {"x-llamasup-client": "key%3Aanna"}, {"x-llamasup-client": "key%3Aben"}


class Server(BatchClient):
    """Answers with the prompt. Prompts with ``wait`` wait until ``gate`` is set."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = asyncio.Event()
        self.keys: list[str | None] = []
        self.unknown: Mapping[str, str] = {}
        self.shown = "fake"

    async def aclose(self) -> None:
        pass

    async def unknown_models(
        self, names: object, wait_s: float = 0.0, on_wait: object = None
    ) -> Mapping[str, str]:
        return self.unknown

    async def send(self, url: str, body: bytes, *, stream: bool = False) -> Answer:
        prompt = json.loads(body)["prompt"]
        if "bug" in prompt:
            raise ZeroDivisionError(prompt)
        if "wait" in prompt:
            self.asked.set()
            await self.gate.wait()
        if "wrong" in prompt:
            error = b'{"error": {"message": "no"}}'
            return Answer(400, error, "r", Refusal(400, "", "no"))
        return Answer(200, json.dumps({"text": prompt}).encode(), "r")


async def own_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LlamasupError)
    return JSONResponse(error_object(error), error.http_status)


async def eventually(look: Callable[[], Coroutine[Any, Any, T]], holds: Callable[[T], bool]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if holds(found := await look()):
                return found
            await asyncio.sleep(0.005)


class Api:
    """The service with its routes, as the control application serves them."""

    def __init__(
        self, service: BatchService, running: asyncio.Task[None], server: Server, http: httpx.AsyncClient
    ) -> None:
        self.service = service
        self.running = running
        self.server = server
        self.http = http

    async def upload(self, content: bytes, owner: Mapping[str, str] = ANNA, **fields: str) -> httpx.Response:
        form = {"purpose": "batch", **fields}
        files = {"file": ("in.jsonl", content)}
        return await self.http.post("/v1/files", files=files, data=form, headers=owner)

    async def create(self, prompts: list[str], owner: Mapping[str, str] = ANNA, **more: Any) -> Any:
        lines = [
            {"custom_id": str(n), "url": "/v1/completions", "body": {"prompt": prompt}}
            for n, prompt in enumerate(prompts)
        ]
        uploaded = await self.upload("\n".join(map(json.dumps, lines)).encode(), owner)
        return await self.begin(uploaded.json()["id"], owner, **more)

    async def begin(self, file_id: str, owner: Mapping[str, str] = ANNA, **more: Any) -> Any:
        body = {
            "input_file_id": file_id,
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            **more,
        }
        return (await self.http.post("/v1/batches", json=body, headers=owner)).json()

    async def get(self, path: str, owner: Mapping[str, str] = ANNA) -> Any:
        return (await self.http.get(path, headers=owner)).json()

    async def end(self, batch: Any, owner: Mapping[str, str] = ANNA) -> Any:
        return await eventually(
            lambda: self.get(f"/v1/batches/{batch['id']}", owner), lambda now: now["status"] in ENDED
        )

    async def lines(self, file_id: str | None) -> dict[str, Any]:
        if file_id is None:
            return {}
        answer = await self.http.get(f"/v1/files/{file_id}/content", headers=ANNA)
        return {line["custom_id"]: line for line in map(json.loads, answer.text.splitlines())}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "CHECK_S", 0.01)
    monkeypatch.setattr(runner_module, "RETRY_S", 0.01)


Serve = Callable[..., AbstractAsyncContextManager["Api"]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Serve batches in the folder of the test, also again after a stop."""
    return partial(serving, tmp_path, monkeypatch)


@asynccontextmanager
async def serving(
    folder: Path, monkeypatch: pytest.MonkeyPatch, keys: Keys | None = None, **settings: Any
) -> AsyncIterator[Api]:
    server = Server()

    def make(url: str, *, socket: str, api_key: str | None) -> Server:
        server.keys.append(api_key)
        return server

    monkeypatch.setattr(runner_module, "BatchClient", make)
    service = BatchService(Batches(enabled=True, **settings), folder / "api", keys or keys_of(folder))
    handlers: Any = {LlamasupError: own_error}
    app = Starlette(routes=list(routes_of(service)), exception_handlers=handlers)
    running = asyncio.get_running_loop().create_task(service.run(UnixAddress(str(folder / "sock"))))
    await asyncio.sleep(0)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        try:
            yield Api(service, running, server, http)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


def keys_of(folder: Path, text: str = "sk-anna name=anna models=tiny\nsk-ben name=ben\n") -> Keys:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return Keys(KeyFile(path), (), lambda: 0.0)


@async_test
async def test_batch_has_a_file_of_answers_and_one_of_errors(serve: Serve, tmp_path: Path) -> None:
    async with serve() as api:
        batch = await api.create(["a", "wrong", "b"], metadata={"k": "v"})
        over = await api.end(batch)
        assert over["status"] == "completed"
        assert over["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        assert over["in_progress_at"] <= over["finalizing_at"] <= over["completed_at"]
        answers = await api.lines(over["output_file_id"])
        assert {id_: line["response"]["body"]["text"] for id_, line in answers.items()} == {
            "0": "a",
            "2": "b",
        }
        assert list(await api.lines(over["error_file_id"])) == ["1"]
        assert not list((tmp_path / "api" / "running").iterdir())
        assert api.server.keys[0]


@pytest.mark.check("X8")
@async_test
async def test_forms_and_the_index_are_read_in_threads(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop is that of the proxy."""

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            threads.append(threading.get_ident())
            return function(*arguments)

        return call

    threads: list[int] = []
    monkeypatch.setattr(UploadForm, "feed", noted(UploadForm.feed))
    monkeypatch.setattr(Index, "counts", noted(Index.counts))
    monkeypatch.setattr(Index, "models", noted(Index.models))
    async with serve() as api:
        assert (await api.end(await api.create(["a"])))["status"] == "completed"
    assert len(threads) > 4
    assert threading.get_ident() not in threads


@async_test
async def test_batch_without_errors_has_no_file_of_errors(serve: Serve) -> None:
    async with serve(Keys(None, (), lambda: 0.0), only_between="00:00-00:00") as api:
        over = await api.end(await api.create(["a"], {}), {})
        assert over["error_file_id"] is None
        assert api.server.keys == [None]


@async_test
async def test_lists_have_pages(serve: Serve) -> None:
    async with serve() as api:
        batches = [await api.create(["a"]) for _ in range(3)]
        for batch in batches:
            await api.end(batch)
        page = await api.get("/v1/batches?limit=2")
        assert [one["id"] for one in page["data"]] == [batches[2]["id"], batches[1]["id"]]
        assert page["has_more"]
        page = await api.get(f"/v1/batches?limit=2&after={page['last_id']}")
        assert [one["id"] for one in page["data"]] == [batches[0]["id"]]
        assert not page["has_more"]
        inputs = await api.get("/v1/files?purpose=batch&order=asc")
        assert [one["id"] for one in inputs["data"]] == [one["input_file_id"] for one in batches]
        assert (await api.get("/v1/files?limit=0"))["error"]["code"] == 400
        assert (await api.get("/v1/batches", BEN))["data"] == []
        assert (await api.get(f"/v1/batches/{batches[0]['id']}", BEN))["error"]["cause"] == "batch_not_found"


@async_test
async def test_upload_is_refused_above_each_limit(serve: Serve, tmp_path: Path) -> None:
    limits: dict[str, Any] = {"max_file": Size(bytes=2000), "disk": Size(bytes=3000), "max_files": 2}
    async with serve(**limits) as api:
        refused = await api.upload(b"x" * 2001)
        assert (refused.status_code, refused.json()["error"]["cause"]) == (413, "file_limit")
        assert (await api.upload(b"x" * 2000)).status_code == 200
        refused = await api.upload(b"x" * 1001, BEN)
        assert (refused.status_code, refused.json()["error"]["cause"]) == (400, "storage_limit")
        assert (await api.upload(b"x" * 10)).status_code == 200
        refused = await api.upload(b"x")
        assert "2 files" in refused.json()["error"]["message"]
        assert len(list((tmp_path / "api" / "files").iterdir())) == 2
        first = (await api.get("/v1/files?order=asc"))["data"][0]
        deleted = await api.http.delete(f"/v1/files/{first['id']}", headers=ANNA)
        assert deleted.json() == {"id": first["id"], "object": "file", "deleted": True}
        assert (await api.get(f"/v1/files/{first['id']}"))["error"]["cause"] == "file_not_found"
        assert (await api.upload(b"x" * 1900, BEN)).status_code == 200


@async_test
async def test_wrong_form_is_refused(serve: Serve, tmp_path: Path) -> None:
    async with serve() as api:
        assert (await api.upload(b"x", purpose="vision")).status_code == 400
        for seconds in (
            "60",
            str(30 * 86_400 + 1),
            "7" * 40,
            "000000086400" + "9" * 28,
            "0000000864009",
            "-7200",
            "٧٢٠٠",
            "7e3",
            "",
        ):
            wrong: dict[str, Any] = {"expires_after[anchor]": "created_at", "expires_after[seconds]": seconds}
            assert (await api.upload(b"x", **wrong)).status_code == 400, seconds
        longer: dict[str, Any] = {"expires_after[seconds]": "7200"}
        kept = await api.upload(b"x", **longer)
        assert kept.json()["expires_at"] == kept.json()["created_at"] + 7200
        no_file = await api.http.post("/v1/files", data={"purpose": "batch"}, headers=ANNA)
        assert no_file.status_code == 400
        head = {**ANNA, "content-type": "multipart/form-data; boundary=x"}
        assert (await api.http.post("/v1/files", content=b"--x\r\n", headers=head)).status_code == 400
        assert [path.name for path in (tmp_path / "api" / "files").iterdir()] == [kept.json()["id"]]


@async_test
async def test_uploads_at_one_time_stay_within_the_disk_together(serve: Serve, tmp_path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        began.set()
        await may_end.wait()
        yield b'Content-Disposition: form-data; name="file"\r\n\r\n' + bytes(3000) + b"\r\n--x--"

    began, may_end = asyncio.Event(), asyncio.Event()
    async with serve(disk=Size(bytes=5000)) as api:
        slow = asyncio.get_running_loop().create_task(
            api.service.upload("key:anna", "multipart/form-data; boundary=x", body())
        )
        await began.wait()
        assert (await api.upload(b"x" * 3000, BEN)).status_code == 200
        may_end.set()
        with pytest.raises(StorageLimit):
            await slow
        assert len(list((tmp_path / "api" / "files").iterdir())) == 1


@async_test
async def test_mistakes_fail_the_batch(serve: Serve) -> None:
    async with serve(max_lines=2) as api:
        uploaded = (await api.upload(b'{"custom_id": "1"}\nno\n')).json()
        over = await api.end(await api.begin(uploaded["id"]))
        assert over["status"] == "failed"
        assert [error["line"] for error in over["errors"]["data"]] == [1, 2]
        over = await api.end(await api.create(["a", "b", "c"]))
        assert "more than 2 lines" in over["errors"]["data"][0]["message"]
        over = await api.end(await api.create(["a"], endpoint="/v1/embeddings"))
        assert "endpoint" in over["errors"]["data"][0]["message"]
        api.server.unknown = {"": "no such model"}
        over = await api.end(await api.create(["a"]))
        assert over["errors"]["data"][-1]["message"].endswith("no such model")
        assert (await api.begin("file-unknown"))["error"]["cause"] == "file_not_found"


@async_test
async def test_running_batch_is_cancelled_and_a_waiting_one_at_once(serve: Serve) -> None:
    async with serve(max_batches=2) as api:
        batch = await api.create(["a", *[f"wait {n}" for n in range(20)]])
        waiting = await api.create(["b"])
        assert "2 unfinished batches" in (await api.create(["c"]))["error"]["message"]
        await api.server.asked.wait()
        refused = await api.http.delete(f"/v1/files/{batch['input_file_id']}", headers=ANNA)
        assert refused.status_code == 409
        assert (await cancelled(api, waiting))["status"] == "cancelled"
        shown = await api.get("/v1/batches")
        assert shown["data"][1]["request_counts"]["total"] == 21
        assert (await cancelled(api, batch))["status"] == "cancelling"
        over = await api.end(batch)
        assert over["status"] == "cancelled"
        answers, failures = [await api.lines(over[f"{kind}_file_id"]) for kind in ("output", "error")]
        assert answers.keys() | failures.keys() == {str(n) for n in range(21)}
        assert not answers.keys() & failures.keys()
        assert {line["error"]["code"] for line in failures.values()} == {"batch_cancelled"}
        assert (await cancelled(api, batch))["status"] == "cancelled"


async def begun(api: Api) -> Any:
    """A batch with an answer to its first line, while its second one waits."""
    batch = await api.create(["a", "wait"])
    await eventually(
        lambda: api.get(f"/v1/batches/{batch['id']}"), lambda now: now["request_counts"]["completed"] == 1
    )
    return batch


async def cancelled(api: Api, batch: Any) -> Any:
    return (await api.http.post(f"/v1/batches/{batch['id']}/cancel", headers=ANNA)).json()


@async_test
async def test_operator_sees_and_cancels_the_batches_of_all_clients(serve: Serve) -> None:
    async with serve() as api:
        first = await api.create(["a"], metadata={"private": "yes"})
        over = await api.end(first)
        second = await api.create(["wait"], BEN)
        await api.server.asked.wait()
        shown = (await api.get("/llamasup/v1/batches"))["batches"]
        assert [(one["id"], one["client"]) for one in shown] == [
            (second["id"], "key:ben"),
            (first["id"], "key:anna"),
        ]
        assert over.pop("metadata") == {"private": "yes"}
        assert shown[1] == {**over, "client": "key:anna"}
        (newest,) = (await api.get("/llamasup/v1/batches?limit=1"))["batches"]
        assert newest["id"] == second["id"]
        answer = await api.http.post(f"/llamasup/v1/batches/{second['id']}/cancel")
        assert answer.json()["status"] == "cancelling"
        assert (await api.end(second, BEN))["status"] == "cancelled"
        unknown = await api.http.post("/llamasup/v1/batches/none/cancel")
        assert unknown.status_code == 404


@async_test
async def test_batch_that_was_cancelled_before_it_starts_does_not_start(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfinished(self: Store) -> Any:
        found = original(self)
        for batch in found:  # as a client that cancels now
            assert self.replace_batch(batch, ended(batch, "cancelled", runner_module.epoch_s()))
        return found

    original = Store.unfinished
    monkeypatch.setattr(Store, "unfinished", unfinished)
    async with serve() as api:
        over = await api.end(await api.create(["a"]))
        assert over["status"] == "cancelled"
        assert over["in_progress_at"] is None
    assert api.server.keys == []


@async_test
async def test_batch_that_was_cancelled_before_its_next_turn_ends_in_this_turn(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as api:
        batch = await begun(api)
        api.service.stop()
        await api.running

    def unfinished(self: Store) -> Any:
        found = original(self)
        for one in found:  # as a client that cancels now
            self.replace_batch(one, replace(one, status="cancelling"))
        return found

    original = Store.unfinished
    monkeypatch.setattr(Store, "unfinished", unfinished)
    async with serve() as api:
        over = await api.end(batch)
        assert over["status"] == "cancelled"
        assert list(await api.lines(over["output_file_id"])) == ["0"]


@async_test
async def test_cancel_looks_again_if_the_batch_has_changed(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_batch(self: Store, *batches: Any) -> bool:
        tries.append(batches)
        return len(tries) > 1 and original(self, *batches)

    original, tries = Store.replace_batch, list[object]()
    monkeypatch.setattr(Store, "replace_batch", replace_batch)
    monkeypatch.setattr(runner_module, "next_batch", lambda *_: None)
    async with serve() as api:
        assert (await cancelled(api, await api.create(["a"])))["status"] == "cancelled"
    assert len(tries) == 2


@async_test
async def test_cancelled_batch_that_waits_for_its_next_turn_keeps_its_answers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as api:
        batch = await begun(api)
        api.service.stop()
        await api.running
    holds = True
    original = next_batch
    monkeypatch.setattr(runner_module, "next_batch", lambda *given: None if holds else original(*given))
    async with serve() as api:
        assert (await api.get(f"/v1/batches/{batch['id']}"))["request_counts"]["completed"] == 1
        assert (await cancelled(api, batch))["status"] == "cancelling"
        holds = False
        await api.create(["a"], BEN)  # the service looks again
        over = await api.end(batch)
        assert over["status"] == "cancelled"
        assert list(await api.lines(over["output_file_id"])) == ["0"]
        assert list(await api.lines(over["error_file_id"])) == ["1"]


class EndlessInput:
    """In place of ``prepare``, until ``is_over``: it reads an input without an end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._original = job_module.prepare
        self.began = threading.Event()
        self.is_over = False
        monkeypatch.setattr(runner_module, "prepare", self._prepare)

    def _prepare(self, job: Any, on_reading: Callable[[int, int], None], **options: Any) -> Any:
        while not self.is_over:
            on_reading(0, 1)
            self.began.set()
            time.sleep(0.001)
        return self._original(job, on_reading, **options)

    async def is_read(self) -> bool:
        return self.began.is_set()


@pytest.mark.parametrize("cancels", [False, True])
@async_test
async def test_stop_and_cancel_end_the_reading_of_an_input(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancels: bool
) -> None:
    reading = EndlessInput(monkeypatch)
    async with serve() as api:
        batch = await api.create(["a"])
        await eventually(reading.is_read, bool)
        if cancels:
            assert (await cancelled(api, batch))["status"] == "cancelling"
            over = await api.end(batch)
            assert (over["status"], over["output_file_id"], over["error_file_id"]) == (
                "cancelled",
                None,
                None,
            )
            assert not list((tmp_path / "api" / "running").iterdir())
        api.service.stop()
    reading.is_over = True
    async with serve() as api:
        assert (await api.end(batch))["status"] == ("cancelled" if cancels else "completed")


@async_test
async def test_files_are_closed_if_the_service_is_cancelled_while_they_open(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, closed = threading.Event(), threading.Event(), list[Prepared]()

    @contextmanager
    def prepare(*arguments: Any, **options: Any) -> Iterator[Prepared]:
        began.set()
        may_end.wait()
        with ExitStack() as stack:
            prepared = stack.enter_context(original(*arguments, **options))
            stack.callback(closed.append, prepared)
            yield prepared

    async def has_begun() -> bool:
        return began.is_set()

    original = job_module.prepare
    monkeypatch.setattr(runner_module, "prepare", prepare)
    async with serve() as api:
        await api.create(["a"])
        await eventually(has_begun, bool)
        asyncio.get_running_loop().call_soon(may_end.set)  # when the service has been cancelled
    assert len(closed) == 1


@async_test
async def test_file_of_an_upload_is_not_closed_while_a_thread_writes_it(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end, written = threading.Event(), threading.Event(), list[int]()

    def write_all(fd: int, data: bytes) -> None:
        began.set()
        may_end.wait()
        written.append(os.write(fd, data))

    async def body() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nline\r\n--x--\r\n'

    async def has_begun() -> bool:
        return began.is_set()

    monkeypatch.setattr(store_module, "_write_all", write_all)
    async with serve() as api:
        uploading = asyncio.get_running_loop().create_task(
            api.service.upload("key:anna", "multipart/form-data; boundary=x", body())
        )
        await eventually(has_begun, bool)
        uploading.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await uploading
        assert written == [4]
        assert not list((tmp_path / "api" / "files").iterdir())


async def ends_early(api: Api, happens: Callable[[], object]) -> Any:
    """A batch whose last lines hang when this happens."""
    batch = await api.create(["a", "wait"])
    await api.server.asked.wait()
    happens()
    return await api.end(batch)


@async_test
async def test_batch_ends_with_its_completion_window(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve() as api:
        later = runner_module.epoch_s() + 2 * 86_400

        def wait() -> None:
            for module in (runner_module, service_module):
                monkeypatch.setattr(module, "epoch_s", lambda: later)

        over = await ends_early(api, wait)
        assert over["status"] == "expired"
        failures = await api.lines(over["error_file_id"])
        assert failures["1"]["error"]["code"] == "batch_expired"
        unstarted = await api.create(["a"])
        assert (await api.end(unstarted))["status"] == "completed"


@async_test
async def test_batch_of_a_key_that_was_removed_fails(serve: Serve, tmp_path: Path) -> None:
    keys = keys_of(tmp_path)

    def change(text: str) -> None:
        (tmp_path / "keys").write_text(text)
        keys.look()

    async with serve(keys) as api:
        assert not keys.has_minted
        batch = await api.create(["a", "wait"])
        await api.server.asked.wait()
        change("sk-anna name=anna models=tiny,other\nsk-ben name=ben\n")
        secret = (api.server.keys[0] or "").encode()

        async def borrowed() -> ApiKey | None:
            return keys.ring.find((secret,))

        key = await eventually(borrowed, lambda key: key is not None and len(key.models) == 2)
        assert key is not None
        assert (key.client, key.controls) == ("key:anna", False)
        change("sk-ben name=ben\n")
        over = await api.end(batch)
        assert over["status"] == "failed"
        assert over["errors"]["data"][0]["code"] == "key_removed"
        assert not keys.has_minted
        assert (await api.end(await api.create(["a"])))["status"] == "failed"


@async_test
async def test_batch_gives_its_turn_to_another_client(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "TURN_S", 0.0)
    async with serve() as api:
        batch = await api.create(["a", "wait"])
        await api.server.asked.wait()
        assert (await api.end(await api.create(["b"], BEN), BEN))["status"] == "completed"
        assert (await api.get(f"/v1/batches/{batch['id']}"))["status"] == "in_progress"
        api.server.gate.set()
        assert (await api.end(batch))["status"] == "completed"


@async_test
async def test_batch_continues_after_a_stop(serve: Serve) -> None:
    async with serve() as api:
        batch = await api.create(["a", "wait"])
        await api.server.asked.wait()
        api.service.stop()
        refused = await api.http.get("/v1/files", headers=ANNA)
        assert refused.status_code == 503
    async with serve() as api:
        api.server.gate.set()
        over = await api.end(batch)
        assert over["status"] == "completed"
        assert sorted(await api.lines(over["output_file_id"])) == ["0", "1"]


def fails_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> list[Exception]:
    """The next call raises ``error``, and those after it work. Returns what was not raised yet."""
    errors, original = [error], getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return errors


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (runner_module, "prepare", StorageLimit("The disk is full.")),
        (Store, "remove_expired", ZeroDivisionError("a bug between batches")),
    ],
)
@async_test
async def test_trouble_of_the_server_is_not_the_end_of_a_batch(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception
) -> None:
    left = fails_once(monkeypatch, owner, name, error)
    async with serve() as api:
        assert (await api.end(await api.create(["a"])))["status"] == "completed"
        assert not left


@async_test
async def test_bug_ends_its_batch_and_no_other(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails_once(monkeypatch, runner_module, "prepare", ZeroDivisionError("a bug"))
    async with serve() as api:
        over = await api.end(await api.create(["a"]))
        assert (over["status"], over["errors"]["data"][0]["code"]) == ("failed", "internal_error")
        assert (await api.end(await api.create(["a"])))["status"] == "completed"
    assert "ZeroDivisionError: a bug" in caplog.text


@async_test
async def test_bug_in_the_run_keeps_the_answers(serve: Serve) -> None:
    async with serve() as api:
        over = await api.end(await api.create(["a", "bug"]))
        assert (over["status"], over["errors"]["data"][0]["code"]) == ("failed", "internal_error")
        answers, failures = [await api.lines(over[f"{kind}_file_id"]) for kind in ("output", "error")]
        assert answers.keys() | failures.keys() == {"0", "1"}
        assert failures["1"]["error"]["code"] == "batch_failed"


@async_test
async def test_model_that_has_gone_at_a_restart_leaves_the_answers(serve: Serve) -> None:
    async with serve() as api:
        batch = await begun(api)
        api.service.stop()
    async with serve() as api:
        api.server.unknown = {"": "no such model"}
        over = await api.end(batch)
        assert over["status"] == "failed"
        assert over["errors"]["data"][-1]["message"].endswith("no such model")
        assert over["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        assert list(await api.lines(over["output_file_id"])) == ["0"]
        assert (await api.lines(over["error_file_id"]))["1"]["error"]["code"] == "batch_failed"


@async_test
async def test_full_disk_at_the_end_of_a_batch_delays_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = [errno.ENOSPC, errno.EIO]
    found: list[int] = []  # parts, before each part is opened

    def open_(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name.endswith(".part"):
            found.append(len(list(path.parent.glob(".*"))))
            if full and found[-1]:
                raise OSError(full.pop(0), "No space left on device")
        return original(path, *arguments, **options)

    original = Path.open
    async with serve() as api:
        batch = await api.create(["wait"])
        await api.server.asked.wait()
        monkeypatch.setattr(Path, "open", open_)
        api.server.gate.set()
        over = await api.end(batch)
        assert over["status"] == "completed"
        assert list(await api.lines(over["output_file_id"])) == ["0"]
        assert found == [0, 1, 0, 1, 0, 1]


@async_test
async def test_counts_are_right_after_a_restart_on_a_full_disk(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise DiskFull("No space is left.")

    async def has_to_wait() -> bool:
        return "A batch has to wait: %s %s" in said

    said: list[str] = []
    monkeypatch.setattr(runner_module._log, "warning", lambda text, *_: said.append(text))
    async with serve() as api:
        batch = await begun(api)
        monkeypatch.setattr(Store, "save_batch", full)
        api.service.stop()
    monkeypatch.setattr(runner_module, "prepare", full)
    said.clear()
    async with serve() as api:
        await eventually(has_to_wait, bool)
        found = await api.get(f"/v1/batches/{batch['id']}")
        assert found["request_counts"] == {"total": 2, "completed": 1, "failed": 0}


@async_test
async def test_upload_that_cannot_be_written_is_refused(serve: Serve, tmp_path: Path) -> None:
    async with serve() as api:
        assert (await api.upload(b"x")).status_code == 200
        (tmp_path / "api" / "files").rename(tmp_path / "gone")
        refused = await api.upload(b"x")
        assert (refused.status_code, refused.json()["error"]["cause"]) == (400, "storage_limit")


@async_test
async def test_folder_that_cannot_be_used_is_told_to_the_client(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "api").write_text("a file")
    async with serve() as api:
        answer = await api.http.get("/v1/files", headers=ANNA)
        assert answer.status_code == 500
        assert "folder" in answer.json()["error"]["message"]
