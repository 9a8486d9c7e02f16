"""Checks a request's body before llama-server has its last byte: the model that it names, its jobs, and the
URLs that llama-server would fetch.

A buffered body is decoded; a body that is forwarded while it arrives is scanned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from llamasup.core.auth.keys import Keys
from llamasup.core.http.address import ANY_HOST
from llamasup.core.http.body_scan import MANY_JOBS, MAX_STEPS, BodyScan, may_hold_url, refused_media, scanned
from llamasup.core.http.heads import HeadRules, HttpError
from llamasup.core.http.requested_model import FORMS_ONLY, BodyTooDeep, lists_of, read_body
from llamasup.core.http.routes import CONTROL, Work
from llamasup.core.proxy.request import Request
from llamasup.core.proxy.settings import ProxyConfig

FEW_STEPS: Final = 25_000
"""The steps of a scan for a route without key limits: 25 ms of the event loop, plus 15 ms for each MiB."""


def judge_body(request: Request, config: ProxyConfig, keys: Keys) -> HttpError | None:
    """Decode a buffered body, and set the requested model and the jobs. Returns the refusal, if any."""
    head, body = request.head, request.body
    route = head.route
    if config.rules.transparent or route is CONTROL or route.of_batches or route.of_router:
        return None
    if config.route_by_model or (body and head.route.infers):
        try:
            requested_model, request.jobs = read_body(body, head.query, head.route.label)
        except BodyTooDeep:
            if config.route_by_model:
                return _TOO_DEEP
            requested_model, request.jobs = None, MANY_JOBS
        if config.route_by_model:
            request.requested_model = requested_model
    if not body:
        return None
    if head.compressed:
        return _COMPRESSED
    if (
        (b'"http' in body or b"\\u00" in body)  # most bodies end here, without a call
        and ANY_HOST not in config.remote_media
        and _takes_media(request)
        and may_hold_url(body)
    ):
        scan = scanned(body, urls=True, most_steps=_max_steps(request))
        if (refusal := _judge_media(request, scan, config.remote_media)) is not None:
            return refusal
    return keys.weigh(request) if request.jobs > 1 else None


def scan_for(request: Request, rules: HeadRules) -> BodyScan | None:
    """The scan of a body that is forwarded while it arrives; None if the body is not checked."""
    if rules.transparent or request.head.route.of_batches:
        return None
    lists = (name.encode() for name in lists_of(request.head.route.label))
    return BodyScan(
        lists if request.needs_permit else (), urls=_takes_media(request), most_steps=_max_steps(request)
    )


def judge_scan(
    request: Request, scan: BodyScan, config: ProxyConfig, keys: Keys, buffered: Callable[[], bytes | None]
) -> HttpError | None:
    """Check a completely scanned body; returns the refusal, if any. ``buffered``: the body, if in memory."""
    if request.head.compressed:
        return _COMPRESSED
    if (refusal := _judge_media(request, scan, config.remote_media)) is not None:
        return refusal
    if request.needs_permit and request.head.route.label not in FORMS_ONLY:
        request.jobs = _jobs_of(request, buffered()) if scan.unclear else scan.jobs
    return keys.weigh(request) if request.jobs > 1 else None


def _jobs_of(request: Request, body: bytes | None) -> int:
    if body is None:
        return MANY_JOBS
    try:
        return read_body(body, b"", request.head.route.label)[1]
    except BodyTooDeep:
        return MANY_JOBS


def _judge_media(request: Request, scan: BodyScan, allowed: tuple[str, ...]) -> HttpError | None:
    if ANY_HOST in allowed:
        return None
    unclear = scan.unclear and scan.suspect
    refusal = _unclear(_max_steps(request)) if unclear else refused_media(scan.remote, allowed)
    if refusal is not None and not request.needs_permit:
        refusal = replace(refusal, close=True)  # no requests-per-minute limit slows the client
    return refusal


def _takes_media(request: Request) -> bool:
    """Whether llama-server could fetch URLs of this body; also true for unknown routes."""
    route = request.head.route
    return route.work is not Work.RERANKING and route.label not in _WITHOUT_MEDIA


def _max_steps(request: Request) -> int:
    return MAX_STEPS if request.needs_permit else FEW_STEPS


def _unclear(most_steps: int) -> HttpError:
    return HttpError(
        400,
        "The body is too complex to check it for URLs that llama-server would fetch",
        cause="body_too_complex",
        remedy=f"send at most {most_steps:,} strings and brackets, with fewer than 512 levels of nesting",
    )


_WITHOUT_MEDIA = frozenset({*FORMS_ONLY, "/tokenize", "/detokenize"})


_TOO_DEEP = HttpError(
    400,
    "The body is nested too deeply to find the model in it",
    cause="body_too_deep",
    remedy="use fewer than 1,000 levels of nesting",
)
_COMPRESSED = HttpError(
    415,
    "The body is compressed (Content-Encoding), so llamasup cannot check it",
    cause="content_encoding",
    remedy="send the body uncompressed",
)
