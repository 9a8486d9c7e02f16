"""The files and batches of the API (pure): which ones are accepted, their JSON, and which batch is next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import asdict, replace

from llamasup.core.system.text import memory_text
from llamasup.errors import LlamasupError, UsageInvalid
from llamasup.features.batch.api.form import UploadForm
from llamasup.features.batch.lines import URLS
from llamasup.features.batch.settings import Batches

ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
DAY_S: Final = 86_400
MAX_FILENAME: Final = 255
_LEAST_KEPT_S: Final = 3_600
_SECONDS: Final = re.compile(r"[1-9][0-9]{0,9}").fullmatch
_MAX_METADATA: Final = 16  # entries, as OpenAI
_MAX_METADATA_KEY: Final = 64
_MAX_METADATA_VALUE: Final = 512
_WINDOW: Final = re.compile(r"([1-9]\d{0,3})([hd])").fullmatch
_MAX_WINDOW_S: Final = 30 * DAY_S  # a batch that never ends would hold its files and its place
_UNIT_S: Final = {"h": 3_600, "d": DAY_S}


class FileUnknown(LlamasupError):
    """The client has no file with this id."""

    exit_code = 66
    http_status = 404
    cause = "file_not_found"


class BatchUnknown(LlamasupError):
    """The client has no batch with this id."""

    exit_code = 66
    http_status = 404
    cause = "batch_not_found"


class FileLimit(LlamasupError):
    """A file is larger than allowed."""

    exit_code = 2
    http_status = 413
    cause = "file_limit"


class StorageLimit(LlamasupError):
    """The files or batches of a client, or of all clients, have reached a limit."""

    exit_code = 71
    http_status = 400
    cause = "storage_limit"


class StoredFile(Struct, frozen=True):
    """A file of a client. ``owner`` is the client as the proxy names it (``key:NAME``), or empty if no key is
    needed. Times are seconds of the epoch.
    """

    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int


class LineMistake(Struct, frozen=True):
    """A mistake in an input. ``line`` is 0 if it is not in one line."""

    code: str
    message: str
    line: int = 0


class StoredBatch(Struct, frozen=True):
    """A batch of a client. Field names and values of ``status`` are OpenAI's."""

    id: str
    owner: str
    input_file_id: str
    endpoint: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: Mapping[str, str] | None = None
    status: str = "validating"
    errors: tuple[LineMistake, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def ended_at(self) -> int | None:
        ends = (self.completed_at, self.failed_at, self.expired_at, self.cancelled_at)
        return next((at for at in ends if at is not None), None)


class NewBatch(Struct, frozen=True):
    """The body of a request for a new batch."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_expires_after: Any | UnsetType = UNSET


def uploaded_file(
    form: UploadForm, id_: str, owner: str, size: int, now_s: int, keep_days: int
) -> StoredFile:
    """Return the file of a complete form. Raises UsageInvalid."""
    fields = form.fields
    if form.filename is None or not form.is_complete:
        raise UsageInvalid(
            "The form of the upload has no file, or ends too early.", remedy="Send the field file."
        )
    purpose = fields.get("purpose", "")
    if purpose != "batch":
        raise UsageInvalid(
            f"purpose is {purpose[:40]!r}; the only files here are inputs of batches.",
            remedy="Use the purpose batch.",
        )
    most_s = keep_days * DAY_S
    asked = fields.get("expires_after[seconds]", str(most_s))
    kept_s = int(asked) if _SECONDS(asked) else 0
    if not _LEAST_KEPT_S <= kept_s <= most_s:
        raise UsageInvalid(
            f"expires_after[seconds] is {asked[:20]!r}.",
            remedy=f"Use {_LEAST_KEPT_S} to {most_s}, or leave it out.",
        )
    filename = form.filename[:MAX_FILENAME] or "upload.jsonl"
    return StoredFile(id_, owner, purpose, filename, size, now_s, now_s + kept_s)


def check_room(settings: Batches, size: int, files: int, all_bytes: int) -> None:
    """Check a file of this size; ``files`` of its client and ``all_bytes`` of all clients include it.

    Raises FileLimit and StorageLimit.
    """
    most, disk = settings.max_file.of(1 << 62), settings.disk.of(1 << 62)
    if size > most:
        raise FileLimit(
            f"The file is larger than {memory_text(most)}.", remedy="Split it into several batches."
        )
    if files > settings.max_files:
        raise StorageLimit(
            f"You have {settings.max_files} files, the most that are kept.", remedy="Delete some of them."
        )
    if all_bytes > disk:
        raise StorageLimit(
            f"The files of all clients have reached {memory_text(disk)}, the limit of this server.",
            remedy="Delete files that you no longer need, or try again later.",
        )


def window_s(text: str) -> int:
    """Return the seconds of a completion window such as ``24h`` or ``3d``. Raises UsageInvalid."""
    match = _WINDOW(text)
    asked_s = 0 if match is None else int(match[1]) * _UNIT_S[match[2]]
    if not 0 < asked_s <= _MAX_WINDOW_S:
        raise UsageInvalid(
            f"completion_window {text[:20]!r} is invalid.",
            remedy="Use a number of hours or days up to 30d: 24h, 3d.",
        )
    return asked_s


def new_batch(asked: NewBatch, id_: str, file: StoredFile, now_s: int) -> StoredBatch:
    """Make a batch from the body of a request. Raises UsageInvalid."""
    if asked.endpoint not in URLS:
        raise UsageInvalid(
            f"endpoint {asked.endpoint[:100]!r} cannot be used in a batch.",
            remedy=f"Use one of {', '.join(URLS)}.",
        )
    if file.purpose != "batch":
        raise UsageInvalid(
            f"The file {file.id!r} has the purpose {file.purpose!r}.",
            remedy="Upload the input with the purpose batch.",
        )
    metadata = asked.metadata
    if metadata is not None and (
        len(metadata) > _MAX_METADATA
        or any(len(key) > _MAX_METADATA_KEY for key in metadata)
        or any(len(value) > _MAX_METADATA_VALUE for value in metadata.values())
    ):
        raise UsageInvalid(
            "metadata is too large.",
            remedy=f"Use at most {_MAX_METADATA} keys of {_MAX_METADATA_KEY} characters, with values of"
            f" {_MAX_METADATA_VALUE}.",
        )
    return StoredBatch(
        id_,
        file.owner,
        file.id,
        asked.endpoint,
        asked.completion_window,
        now_s,
        now_s + window_s(asked.completion_window),
        metadata,
    )


def ended(batch: StoredBatch, status: str, now_s: int, **changes: Any) -> StoredBatch:
    """Return the batch with this final ``status`` (one of ``ENDED``)."""
    return replace(batch, status=status, **{f"{status}_at": now_s}, **changes)


# --- JSON


def file_object(file: StoredFile) -> Mapping[str, Any]:
    fields = asdict(file)
    del fields["owner"]
    return {**fields, "object": "file", "status": "processed", "status_details": None}


def batch_object(batch: StoredBatch) -> Mapping[str, Any]:
    fields = asdict(batch)
    counts = {name: fields.pop(name) for name in ("total", "completed", "failed")}
    del fields["owner"]
    errors = [
        {"code": one.code, "message": one.message, "line": one.line or None, "param": None}
        for one in batch.errors
    ]
    fields["errors"] = {"object": "list", "data": errors} if errors else None
    return {**fields, "object": "batch", "request_counts": counts}


def page(objects: Sequence[Mapping[str, Any]], *, has_more: bool) -> Mapping[str, Any]:
    """Return a page of a list, as OpenAI's client reads it."""
    return {
        "object": "list",
        "data": list(objects),
        "first_id": objects[0]["id"] if objects else None,
        "last_id": objects[-1]["id"] if objects else None,
        "has_more": has_more,
    }


# --- turns

TURN_S: Final = 300.0
"""A batch runs for so long while other clients have batches. Ending a turn costs the answers in flight."""


def next_batch(unfinished: Sequence[StoredBatch], turns: Mapping[str, int], now_s: int) -> StoredBatch | None:
    """Return the next batch. ``unfinished``: the oldest first. ``turns``: the last turn of each client.

    The clients take turns, each with its oldest batch. A batch that was cancelled, or whose window has ended,
    comes first: it only ends.
    """
    return min(
        unfinished,
        key=lambda batch: (
            batch.status != "cancelling" and batch.expires_at > now_s,
            turns.get(batch.owner, 0),
        ),
        default=None,
    )
