"""The route of llama-server that a path belongs to, and the paths that stay closed (X7).

Routes are looked up by the raw path, without surplus slashes (``plain_path``). All other spellings of a known
path are refused (``misspelled``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import StrEnum
from typing import Final
from urllib.parse import unquote_to_bytes

import msgspec

OTHER_LABEL: Final = "other"
"""The label of unknown and of closed paths."""

_CHATS = """
    /chat/completions /v1/chat/completions /apply-template
    /chat/completions/input_tokens /v1/chat/completions/input_tokens
"""
_RESPONSES = "/responses /v1/responses /responses/input_tokens /v1/responses/input_tokens"
CHATS: Final = frozenset(_CHATS.split())
"""The labels of the routes whose body has ``messages`` as a chat."""
RESPONSES: Final = frozenset(_RESPONSES.split())
"""The labels of the routes whose body has ``input`` as ``/v1/responses``."""
CONVERSATIONS: Final = CHATS | RESPONSES | {"/v1/messages", "/v1/messages/count_tokens"}
"""The labels of the routes whose body has a conversation."""


class Work(StrEnum):
    """The work that a route asks of a model, if models differ in it."""

    TEXT = "text"
    EMBEDDINGS = "embeddings"
    RERANKING = "reranking"
    DECISIONS = "decisions"


class Route(msgspec.Struct, frozen=True):
    """A route. ``label`` is its name in metrics, which invented paths of clients must not enlarge."""

    label: str
    infers: bool = False  # its answer ends with token counts
    streams: bool = False  # its answer is a stream of events if the body requests one
    waits: bool = False  # its POSTs wait while a model loads
    repeats: bool = False  # its POSTs may be sent again after a crash
    work: Work | None = None  # that the model must support; None: any model answers
    lists: bool = False  # lists the models, or describes one
    has_paths: bool = False  # its answer contains paths of this machine
    of_batches: bool = False  # of the API for batches
    of_router: bool = False  # loads and unloads models, as llama.cpp's router does
    is_known: bool = True  # some build of llama-server has it, or llamasup itself


_GENERATION = """
    /completion /completions /v1/completions /chat/completions /v1/chat/completions /responses /v1/responses
    /v1/messages /infill
"""
_EMBEDDINGS = "/embedding /embeddings /v1/embeddings"
_RERANKING = "/rerank /reranking /v1/rerank /v1/reranking"
_DECISIONS = "/v1/systemone"  # since October 2026 (b11361)
_TRANSCRIPTION = "/audio/transcriptions /v1/audio/transcriptions"
_TEXT = """
    /tokenize /detokenize /apply-template /v1/messages/count_tokens /chat/completions/input_tokens
    /v1/chat/completions/input_tokens /responses/input_tokens /v1/responses/input_tokens
"""
# These requests do not wait: the web interface and monitors read llama-server's 503 as "still loading", and
# a change must not reach another server than the current one.
_PLAIN = """
    / /health /v1/health /livez /readyz /metrics /slots /v1/stream /v1/streams/lookup
    /v1/chat/completions/control
"""
_SETTINGS = "/props /lora-adapters"
_TOOLS = "/tools /cors-proxy /mcp"
_ROUTER = "/models/load /models/unload /models/sse"
_ROUTES = {
    path.encode(): Route(path, infers=True, streams=True, waits=True, repeats=True, work=Work.TEXT)
    for path in _GENERATION.split()
}
for _paths, _work in (
    (_EMBEDDINGS, Work.EMBEDDINGS),
    (_RERANKING, Work.RERANKING),
    (_DECISIONS, Work.DECISIONS),
    (_TRANSCRIPTION, None),  # the projector decides whether the model hears
):
    _ROUTES |= {
        path.encode(): Route(path, infers=True, waits=True, repeats=True, work=_work)
        for path in _paths.split()
    }
_ROUTES |= {path.encode(): Route(path, waits=True, repeats=True) for path in _TEXT.split()}
_ROUTES |= {path.encode(): Route(path) for path in _PLAIN.split()}
_ROUTES |= {path.encode(): Route(path, has_paths=True) for path in _SETTINGS.split()}
_MODELS, _V1_MODELS = Route("/models", lists=True), Route("/v1/models", lists=True)
_ROUTES |= {b"/models": _MODELS, b"/v1/models": _V1_MODELS}
ENGINE: Final = Route("command", infers=True, waits=True)
"""The route of a path that only a model with a command has."""
CONTROL = Route("/llamasup")
# Those of the API for batches, if there is one.
FILES, _BATCHES = Route("/v1/files", of_batches=True), Route("/v1/batches", of_batches=True)
# A POST to an unknown path counts as inference, because some builds have their own inference routes, and keys
# would have no limits there. It is never sent a second time, because it may change something.
_OTHER = Route(OTHER_LABEL, infers=True, waits=True, is_known=False)
_CLOSED_ROUTE = Route(OTHER_LABEL)
_ROUTES |= {path.encode(): _CLOSED_ROUTE for path in _TOOLS.split()}
_ROUTES |= {path.encode(): Route(path, of_router=True) for path in _ROUTER.split()}


def route_of(path: bytes, *, batches: bool = False) -> Route:
    """Return the route of a raw path; every unknown path is ``other``.

    ``batches``: there is an API for batches.
    """
    route = _ROUTES.get(path)
    if route is not None:
        return route
    if path.startswith(b"/llamasup/"):
        return CONTROL
    if path.startswith(b"/v1/models/"):
        return _V1_MODELS
    if path.startswith(b"/slots/"):
        return _CLOSED_ROUTE
    if batches and (path == b"/v1/files" or path.startswith(b"/v1/files/")):
        return FILES
    if batches and (path == b"/v1/batches" or path.startswith(b"/v1/batches/")):
        return _BATCHES
    return _MODELS if path.startswith(b"/models/") else _OTHER


_SLASHES = re.compile(rb"//+")


def plain_path(path: bytes, prefix: bytes = b"", *, batches: bool = False) -> bytes:
    """Remove surplus slashes from a known route: base URLs end in a slash, or are joined with one.

    Every check and the request to llama-server take the result for the path, so a slash changes no right. The
    path of no known route, and of the control API, is returned unchanged. So is a longer spelling of the
    root: the relative links of its page would lead elsewhere.
    """
    if b"//" not in path and not path.endswith(b"/"):
        return path
    merged = _SLASHES.sub(b"/", path)
    for plain in (merged.removesuffix(b"/"), merged):
        rest = plain.removeprefix(prefix)
        if rest == b"/" and plain != path:
            return path
        if rest in _ROUTES or (route := route_of(rest, batches=batches)).lists or route.of_batches:
            return plain
    return path


def is_below(path: str, folder: str) -> bool:
    """Whether no server reads this raw path as one outside of ``folder``, which ends in a slash."""
    return path.startswith(folder) and (canonical_path(path.encode("latin-1")) + b"/").startswith(
        canonical_path(folder.encode("latin-1")).rstrip(b"/") + b"/"
    )


def works_of(answers: Callable[[str], bool]) -> tuple[Work, ...]:
    """Return the work of llama-server's routes that another server ``answers``, too."""
    return tuple({route.work: None for route in _ROUTES.values() if route.work and answers(route.label)})


_UNICODE_ESCAPES = re.compile(rb"%u([0-9a-f]{4})", re.IGNORECASE)


def canonical_path(path: bytes) -> bytes:
    """Return the path as the most lenient server would read it: decoded, in lower case, without dot segments.

    Only for refusals. llama-server decodes once, also ``%u0074`` (b11434), and compares case; this function
    goes further, so that no spelling of a closed path passes in any build.
    """
    decoded = path
    for _ in range(4):  # %2525…: each round removes one layer; no honest path has more than three
        once = unquote_to_bytes(_UNICODE_ESCAPES.sub(_as_utf8, decoded))
        if once == decoded:
            break
        decoded = once
    parts: list[bytes] = []
    for part in decoded.lower().replace(b"\\", b"/").split(b"/"):
        bare = part.partition(b";")[0].strip()
        if bare == b"..":
            del parts[-1:]
        elif bare not in (b"", b"."):
            parts.append(bare)
    return b"/" + b"/".join(parts)


def _as_utf8(escape: re.Match[bytes]) -> bytes:
    return chr(int(escape[1], 16)).encode("utf-8", "surrogatepass")


def misspelled(path: bytes, prefix: bytes = b"") -> Route | None:
    """Return the known route that this path decodes to, if its raw form is another one; else None.

    llama-server b11434 serves ``/v1/%63ompletions`` and ``/v1/%u0063ompletions``. An id below ``/v1/models/``
    may contain any escapes.
    """
    if path in _ROUTES:
        return None
    canonical = canonical_path(path)
    if prefix:
        canonical = canonical.removeprefix(canonical_path(prefix))
    route = route_of(canonical)
    return None if route.label in (OTHER_LABEL, route_of(path.removeprefix(prefix)).label) else route


# /llamasup is here for its other spellings; another function handles the plain one. The same is true of loads
# and unloads where llamasup has the API of a router.
_CLOSED = (b"/tools", b"/cors-proxy", b"/mcp", b"/models/load", b"/models/unload", b"/llamasup")
_READS = frozenset({b"GET", b"HEAD", b"OPTIONS"})
_CLOSED_CHANGES = frozenset(path.encode() for path in _SETTINGS.split())  # settings that all clients share
_NEVER_CLOSED = frozenset(_ROUTES) - _CLOSED_CHANGES - {*_CLOSED}


def closed_by_default(method: bytes, path: bytes, prefix: bytes = b"") -> bool:
    """Return whether X7 keeps this closed: tools, proxies, slot files, changes of /props and /lora-adapters.

    Any change below ``/slots/`` is closed, whatever its query says: ``action`` may also come in a form body.
    """
    if path in _NEVER_CLOSED:
        return False
    canonical = canonical_path(path)
    if prefix:
        canonical = canonical.removeprefix(canonical_path(prefix))
    for closed in _CLOSED:
        if canonical == closed or canonical.startswith(closed + b"/"):
            return True
    if method in _READS:
        return False
    return canonical in _CLOSED_CHANGES or canonical.startswith(b"/slots/")
