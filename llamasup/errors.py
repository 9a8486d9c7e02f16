"""Every error that llamasup raises on purpose.

One root class; one branch for each party who can act on it. The exit code (sysexits, docs/design.md)
and the HTTP status are attributes of the class, so that whoever catches the root can report it rightly.
"""

from __future__ import annotations

__all__ = [
    "AccessDenied",
    "BrokenRuntime",
    "ConfigInvalid",
    "Conflict",
    "ControlFailed",
    "DoesNotFit",
    "DraftMismatch",
    "FolderUnusable",
    "GaveUp",
    "LlamasupError",
    "LogMissing",
    "ModelInvalid",
    "ModelMissing",
    "ModelUnknown",
    "NotAllowed",
    "NotRunning",
    "OutputFailed",
    "PortInUse",
    "PortNotAllowed",
    "ProjectorMismatch",
    "RuntimeMissing",
    "ServerFailed",
    "ServiceManagerFailed",
    "Stopping",
    "UnitNotOurs",
    "UnsafeBind",
    "UsageInvalid",
]


class LlamasupError(Exception):
    """What happened (with the value seen), and what to do about it.

    ``message`` is one sentence; ``remedy`` is an instruction, empty where there is none;
    ``lines`` are the telling lines of llama-server's own log, oldest first; ``details`` are lines of our own
    that belong to the message, such as a table.
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
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.lines = lines
        self.details = details


# --- the person at the keyboard ------------------------------------------------------------------


class UsageInvalid(LlamasupError):
    """An option or argument that cannot be meant."""

    exit_code = 2
    http_status = 400
    cause = "usage"


class ConfigInvalid(LlamasupError):
    """A configuration that cannot be used."""

    exit_code = 78
    http_status = 400
    cause = "config_invalid"


class UnsafeBind(ConfigInvalid):
    """A non-loopback address without an API key (X1)."""

    cause = "unsafe_bind"


class UnitNotOurs(ConfigInvalid):
    """A systemd unit of that name is there, and llamasup has not written it."""

    cause = "unit_not_ours"


# --- the model file ------------------------------------------------------------------------------


class ModelMissing(LlamasupError):
    """There is no such model file, or it may not be read."""

    exit_code = 66
    http_status = 404
    cause = "model_missing"


class ModelUnknown(LlamasupError):
    """No model that is served has this name."""

    exit_code = 66
    http_status = 404
    cause = "model_not_found"


class ModelInvalid(LlamasupError):
    """The file is corrupt, truncated, or nothing that llama-server can serve."""

    exit_code = 65
    http_status = 503
    cause = "model_invalid"


class AccessDenied(ModelMissing):
    """The model is somewhere, perhaps, and whoever asks may not have it."""

    cause = "access_denied"


class DraftMismatch(ModelInvalid):
    """The draft model and the model do not have the same vocabulary."""

    cause = "draft_mismatch"


class ProjectorMismatch(ModelInvalid):
    """The projector was made for another model."""

    cause = "projector_mismatch"


# --- the machine ---------------------------------------------------------------------------------


class PortInUse(LlamasupError):
    """Another process has the address."""

    exit_code = 71
    cause = "port_in_use"


class PortNotAllowed(LlamasupError):
    """The address does not exist here, or needs rights that we lack."""

    exit_code = 71
    cause = "port_not_allowed"


class OutputFailed(LlamasupError):
    """What was asked for cannot be written to where it was to go."""

    exit_code = 71
    cause = "output_failed"


class DoesNotFit(LlamasupError):
    """The model needs more memory than there is."""

    exit_code = 71
    http_status = 503
    cause = "does_not_fit"


class DiskFull(LlamasupError):
    """A file is larger than the room that there is for it."""

    exit_code = 71
    http_status = 503
    cause = "disk_full"


class FolderUnusable(LlamasupError):
    """A folder of our own cannot be made private, or not be written."""

    exit_code = 71
    cause = "folder_unusable"


class ServiceManagerFailed(LlamasupError):
    """systemd is not there, or will not do what it was asked."""

    exit_code = 71
    cause = "service_manager"


# --- who has the model ---------------------------------------------------------------------------


class DownloadFailed(LlamasupError):
    """The server cannot be reached, does not answer, or breaks off; later it may."""

    exit_code = 75
    http_status = 503
    cause = "download_failed"


class DownloadRefused(LlamasupError):
    """Where the download leads must not be asked (X11)."""

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
    """The executable is there, but it is not a llama-server, or it cannot run here."""

    cause = "runtime_broken"


class ServerFailed(LlamasupError):
    """llama-server ended while starting; its diagnosis carries its own cause and exit code."""

    http_status = 503

    def __init__(
        self, message: str, *, cause: str, exit_code: int, remedy: str = "", lines: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, remedy=remedy, lines=lines)
        self.cause = cause
        self.exit_code = exit_code


class GaveUp(LlamasupError):
    """It crashed too often (S3)."""

    exit_code = 75
    http_status = 503
    cause = "crash_loop"


# --- a running llamasup --------------------------------------------------------------------------


class NotRunning(LlamasupError):
    """There is no llamasup that could be asked."""

    exit_code = 69
    http_status = 503
    cause = "not_running"


class ControlFailed(LlamasupError):
    """A running llamasup does not answer, or not in words that are understood here."""

    exit_code = 69
    http_status = 502
    cause = "control_failed"


class NotAllowed(LlamasupError):
    """Whoever asks has no key with the right to it."""

    exit_code = 77
    http_status = 403
    cause = "not_allowed"


class Conflict(LlamasupError):
    """What was asked for has been overtaken by something else that was asked for."""

    exit_code = 75
    http_status = 409
    cause = "conflict"


class Stopping(LlamasupError):
    """llamasup is on its way out."""

    exit_code = 69
    http_status = 503
    cause = "stopping"


class LogMissing(LlamasupError):
    """The output of this model's llama-server is not there to be read."""

    exit_code = 66
    http_status = 404
    cause = "no_log"
