"""The reasons why a request cannot be served now, in the words that its client gets."""

from __future__ import annotations

from typing import Final, Self, final

from msgspec import Struct
from msgspec.structs import replace

from llamasup.core.http.heads import HttpError
from llamasup.core.queueing.wait_estimate import eta_text


@final
class Unavailable(Struct, frozen=True):
    """The reason why a request cannot be served now, with the fields of llama-server's error object.

    ``queueable``: a generation that serves will come, so a request may queue. ``absent``: no server has the
    model, and none is starting. ``percent``: how much of the model is loaded; ``eta_s``: until it serves, or
    until a permit is free. None: not known.
    """

    status: int
    message: str
    type: str = "unavailable_error"
    cause: str = ""
    remedy: str = ""
    retry_after_s: float | None = None
    queueable: bool = False
    absent: bool = False
    percent: float | None = None
    eta_s: float | None = None

    @classmethod
    def because(cls, error: HttpError) -> Self:
        """Make a refusal that no wait changes."""
        return cls(error.status, error.message, error.type, error.cause, error.remedy, error.retry_after_s)

    def as_error(self) -> HttpError:
        """Make the error that the proxy sends. During a load, its message also says how far the load is."""
        error = self.as_health()
        if self.percent is None or self.eta_s is None:
            return error
        return replace(
            error, message=f"{self.message}; {self.percent:.0f} % loaded, about {eta_text(self.eta_s)} left"
        )

    def as_health(self) -> HttpError:
        """Make the error for a health check, with the message of llama-server itself."""
        return HttpError(
            self.status,
            self.message,
            self.type,
            self.cause,
            self.remedy,
            self.retry_after_s,
            percent=self.percent,
            eta_s=self.eta_s,
        )

    def as_state(self) -> HttpError:
        """Make the error without its reason, for clients without a key.

        The reason may be a diagnosis that quotes the server's log.
        """
        message = self.message if self.message == "Loading model" else "The server is not ready"
        return HttpError(self.status, message, self.type, retry_after_s=self.retry_after_s)


BUSY: Final = Unavailable(429, "The model is busy", "rate_limit_error", cause="busy", queueable=True)
"""No permit is free. A request that may not wait gets a longer message from the queue."""


def generation_ended(message: str, cause: str = "generation_ended", remedy: str = "") -> Unavailable:
    """Make the reason for requests that end together with their generation."""
    return Unavailable(503, message, cause=cause, remedy=remedy, retry_after_s=1.0)
