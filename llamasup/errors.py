"""The errors that llamasup raises on purpose, with one root class.

The sections follow who can act on an error: the user, the model file, the machine, and so on. The exit code
(sysexits, docs/design.md) and the HTTP status are attributes of the class, for code that catches the root.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

_ERRNO = re.compile(r"\[(?:Errno|WinError) -?\d+\] ")
# A word that is written as it is: a name of a file, an option, a command.
_VERBATIM = re.compile(r"llamasup\b|rights=|chmod\b|\S*[./_=]\S")
# A full stop after a command would be copied with it.
_ENDS_WITH_COMMAND = re.compile(r": (?:llamasup|chmod|pipx|uv|ln|\S*python\S*) [^:]*$|\./\S*$")


def without_errno(text: str) -> str:
    """Return the text without the numbers that the operating system gives its errors."""
    return _ERRNO.sub("", text) if "rr" in text else text


def text_of(error: BaseException) -> str:
    """Return the text of an exception without error numbers; the name of its class if it has no text."""
    return without_errno(str(error)) or type(error).__name__


def as_sentence(remedy: str) -> str:
    """Return the remedy with a capital letter and a full stop."""
    if not remedy:
        return ""
    if not _VERBATIM.match(remedy):
        remedy = remedy[0].upper() + remedy[1:]
    return remedy if remedy.endswith((".", "?", "!")) or _ENDS_WITH_COMMAND.search(remedy) else f"{remedy}."


class LlamasupError(Exception):
    """``message`` is one sentence: what happened, with the value seen. ``remedy`` is an instruction or empty.

    ``lines`` are the relevant lines of llama-server's log, oldest first. ``details`` are further lines of
    llamasup itself, such as a table.
    """

    exit_code = 70
    http_status = 500
    cause = "internal"

    def __init__(
        self,
        message: str,
        *,
        remedy: str = "",
        lines: tuple[str, ...] = (),
        details: tuple[str, ...] = (),
    ) -> None:
        self.message = without_errno(message)
        super().__init__(self.message)
        self.remedy = as_sentence(remedy)
        self.lines = lines
        self.details = details


# --- the user ------------------------------------------------------------------------------------


class UsageInvalid(LlamasupError):
    """An invalid option or argument."""

    exit_code = 2
    http_status = 400
    cause = "usage"


class ConfigInvalid(LlamasupError):
    """An invalid configuration."""

    exit_code = 78
    http_status = 400
    cause = "config_invalid"


class UnsafeBind(ConfigInvalid):
    """A non-loopback address without an API key (X1)."""

    cause = "unsafe_bind"


class UnitNotOurs(ConfigInvalid):
    """A systemd unit of that name exists, and llamasup did not write it."""

    cause = "unit_not_ours"


# --- the model file ------------------------------------------------------------------------------


class ModelMissing(LlamasupError):
    """The model file does not exist, or is not readable."""

    exit_code = 66
    http_status = 404
    cause = "model_missing"


class ModelUnknown(LlamasupError):
    """No served model has this name."""

    exit_code = 66
    http_status = 404
    cause = "model_not_found"


class ModelInvalid(LlamasupError):
    """The file is corrupt, truncated, or not a model that llama-server can serve."""

    exit_code = 65
    http_status = 503
    cause = "model_invalid"


class AccessDenied(ModelMissing):
    """The hub denies access to the model. It may not exist."""

    cause = "access_denied"


class DraftMismatch(ModelInvalid):
    """The draft model and the model do not have the same vocabulary."""

    cause = "draft_mismatch"


class ProjectorMismatch(ModelInvalid):
    """The projector was made for another model."""

    cause = "projector_mismatch"


# --- the machine ---------------------------------------------------------------------------------


class PortInUse(LlamasupError):
    """Another process uses the address."""

    exit_code = 71
    cause = "port_in_use"


class PortNotAllowed(LlamasupError):
    """The address does not exist here, or llamasup may not use it."""

    exit_code = 71
    cause = "port_not_allowed"


class OutputFailed(LlamasupError):
    """The output cannot be written to its destination."""

    exit_code = 71
    cause = "output_failed"


class DoesNotFit(LlamasupError):
    """The model needs more memory than is available."""

    exit_code = 71
    http_status = 503
    cause = "does_not_fit"


class DiskFull(LlamasupError):
    """A file is larger than the free space on its disk."""

    exit_code = 71
    http_status = 503
    cause = "disk_full"


class FolderUnusable(LlamasupError):
    """A folder of llamasup cannot be made private, or is not writable."""

    exit_code = 71
    cause = "folder_unusable"


class TasksExhausted(LlamasupError):
    """No further thread or process can be started."""

    exit_code = 71
    http_status = 503
    cause = "tasks_limit"


class NothingWritable(FolderUnusable):
    """No folder for the sockets and other files of a run can be used."""

    exit_code = 73
    cause = "nothing_writable"


class FleetUnusable(LlamasupError):
    """The package for a fleet, its Ray cluster or its directory cannot be used."""

    exit_code = 69
    http_status = 503
    cause = "fleet_unusable"


class FleetLate(FleetUnusable):
    """Ray has not finished in time. Ray continues, or a later attempt may succeed."""

    exit_code = 75
    cause = "fleet_late"


class ServiceManagerFailed(LlamasupError):
    """systemd is missing, or refused a command."""

    exit_code = 71
    cause = "service_manager"


# --- the hub -------------------------------------------------------------------------------------


class DownloadFailed(LlamasupError):
    """The hub is unreachable, does not answer, or breaks off. A later attempt may succeed."""

    exit_code = 75
    http_status = 503
    cause = "download_failed"


class DownloadRefused(LlamasupError):
    """The download leads to a forbidden address (X11)."""

    exit_code = 78
    http_status = 503
    cause = "download_refused"


# --- llama-server --------------------------------------------------------------------------------


class RuntimeMissing(LlamasupError):
    """No executable that understands llama-server's command line was found."""

    exit_code = 69
    http_status = 503
    cause = "runtime_missing"


class BrokenRuntime(RuntimeMissing):
    """The executable exists, but it is not a llama-server, or cannot run here."""

    cause = "runtime_broken"


class BuildRefused(LlamasupError):
    """A new build of llama.cpp has not proven itself, and does not serve."""

    exit_code = 69
    http_status = 409
    cause = "build_refused"


class BuildUnproven(BuildRefused):
    """It could not prove itself now. Another try may have another result."""

    cause = "build_unproven"


class ServerFailed(LlamasupError):
    """llama-server exited during its start. The diagnosis has the cause and the exit code."""

    http_status = 503

    def __init__(
        self, message: str, *, cause: str, exit_code: int, remedy: str = "", lines: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, remedy=remedy, lines=lines)
        self.cause = cause
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        # pickle makes an exception again from its positional arguments alone, and then sets its attributes.
        again = partial(ServerFailed, cause=self.cause, exit_code=self.exit_code)
        return again, (self.message,), self.__dict__


class WorkerMissing(LlamasupError):
    """An RPC worker of the model cannot be reached, and the model does not fit without it. It may return."""

    exit_code = 75
    http_status = 503
    cause = "rpc_worker_missing"


class GaveUp(LlamasupError):
    """llama-server crashed too often (S3)."""

    exit_code = 75
    http_status = 503
    cause = "crash_loop"


class TuningFailed(LlamasupError):
    """A tuning could not measure anything, or had to stop. Nothing was changed."""

    exit_code = 75
    http_status = 409
    cause = "tuning_failed"


# --- a running llamasup --------------------------------------------------------------------------


class NotRunning(LlamasupError):
    """No llamasup is running."""

    exit_code = 69
    http_status = 503
    cause = "not_running"


class ClientMissing(LlamasupError):
    """The client program that a command should start is not installed."""

    exit_code = 69
    cause = "client_missing"


class ControlFailed(LlamasupError):
    """A running llamasup does not answer, or its answer is invalid."""

    exit_code = 69
    http_status = 502
    cause = "control_failed"


class NotAllowed(LlamasupError):
    """The client has no API key with the required right."""

    exit_code = 77
    http_status = 403
    cause = "not_allowed"


class BodyTooLarge(LlamasupError):
    """The body of a request to the control API is too large."""

    exit_code = 2
    http_status = 413
    cause = "body_limit"


class Conflict(LlamasupError):
    """A later request has replaced this one."""

    exit_code = 75
    http_status = 409
    cause = "conflict"


class Stopping(LlamasupError):
    """llamasup is stopping."""

    exit_code = 69
    http_status = 503
    cause = "stopping"


class RequestUnknown(LlamasupError):
    """No request in flight has this id."""

    exit_code = 66
    http_status = 404
    cause = "request_not_found"


class LogMissing(LlamasupError):
    """There is no log of this model's llama-server."""

    exit_code = 66
    http_status = 404
    cause = "no_log"


ERRORS: tuple[type[LlamasupError], ...] = tuple(
    kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, LlamasupError)
)
