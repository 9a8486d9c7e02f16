"""Decides which models the nodes have together, under which names, and what a node can do for each (pure).

Models with the same id are the same model. An id counts on every node that has it. An alias counts if all of
these nodes know it for the same model: the body of a request goes to a node unchanged, with the name that
the client wrote. A name of this node always leads to the model of this node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any, Final

from msgspec import Struct

from llamasup.core.http.heads import HttpError
from llamasup.core.http.routes import Work
from llamasup.core.models.access import ListedModel, ResolvedModel
from llamasup.core.pool.catalog.v1_models import NodeModel
from llamasup.core.pool.shown_state import ListedStatus, ShownState
from llamasup.core.pool.why.state_reasons import Explanation
from llamasup.core.queueing.wait_estimate import ServedLoad, progress_text, retry_after_s
from llamasup.core.system.text import sentence
from llamasup.features.peers.nodes import ExpectedModel, KnownNode, NodeState

RETRY_S: Final = 2.0  # the time in which a node that is back is noticed


class ModelGroup(Struct, frozen=True):
    """A model of other nodes. ``nodes``: those that list it, by name. ``is_local``: this node has it."""

    model: ResolvedModel
    nodes: Mapping[str, NodeModel]
    expected: ExpectedModel | None = None
    is_local: bool = False


def groups_of(
    nodes: Sequence[KnownNode],
    expected: Iterable[ExpectedModel],
    local: Callable[[str], ResolvedModel | None],
) -> tuple[ModelGroup, ...]:
    """Group the models of the nodes. ``local`` returns the model of this node with this name."""
    members: dict[str, dict[str, NodeModel]] = {}
    for known in nodes:
        if known.listing is not None and known.state is not NodeState.DUPLICATE:
            for listed in known.listing.models:
                members.setdefault(listed.id, {})[known.peer.name] = listed
    coming = {model.id: model for model in expected}
    for id_ in coming:
        members.setdefault(id_, {})
    taken: set[str] = set(members)
    groups = []
    for id_, by_node in members.items():
        own = local(id_)
        if own is not None and own.id != id_:
            continue  # an alias of this node for another model
        aliases = _shared_aliases(id_, by_node, coming.get(id_), own)
        free = tuple(
            alias
            for alias in aliases
            if alias not in taken and ((found := local(alias)) is None or found.id == id_)
        )
        taken.update(free)
        works = own.works if own is not None else _works(by_node.values())
        model = ResolvedModel((id_, *free), works, engine=None if own is None else own.engine)
        groups.append(ModelGroup(model, by_node, coming.get(id_), is_local=own is not None))
    return tuple(groups)


def _shared_aliases(
    id_: str, by_node: Mapping[str, NodeModel], expected: ExpectedModel | None, own: ResolvedModel | None
) -> tuple[str, ...]:
    lists = [model.aliases for model in by_node.values()]
    if own is not None:
        lists.append(own.names)
    if expected is not None:
        lists.append(expected.aliases)
    first, *others = lists
    return tuple(alias for alias in first if alias != id_ and all(alias in other for other in others))


def _works(models: Iterable[NodeModel]) -> tuple[Work, ...]:
    """The work that one of the nodes does; all work if none is known."""
    done = {work for model in models for work in model.works}
    return tuple(work for work in Work if work in done) or tuple(Work)


# --- which node serves -------------------------------------------------------------------------------


def warm(group: ModelGroup, nodes: Mapping[str, KnownNode]) -> tuple[str, ...]:
    """Return the names of the nodes that serve the model now."""
    return tuple(
        name for name, model in group.nodes.items() if model.serves and _gets_requests(nodes.get(name))
    )


def cold_choice(group: ModelGroup, nodes: Mapping[str, KnownNode]) -> str | None:
    """Return the node that loads the model if none serves it: one that loads it already, the soonest first;
    else the one with the fewest requests. One request is enough to load it there.
    """
    able = [
        (name, model)
        for name, model in group.nodes.items()
        if model.can_serve and _gets_requests(nodes.get(name))
    ]
    if not able:
        return None
    name, _ = min(able, key=lambda item: _coldness(item[1], nodes[item[0]]))
    return name


def _coldness(model: NodeModel, node: KnownNode) -> tuple[bool, float, int]:
    is_away = model.state == ShownState.STOPPED
    return is_away, 0.0 if is_away or model.eta_s is None else model.eta_s, node.requests


def _gets_requests(known: KnownNode | None) -> bool:
    return known is not None and known.gets_requests


def why_not_served(group: ModelGroup, nodes: Mapping[str, KnownNode]) -> HttpError:
    """Return the answer to requests while no node can take them."""
    id_ = group.model.id
    present = [(name, model) for name, model in group.nodes.items() if _gets_requests(nodes.get(name))]
    for name, model in present:
        if model.can_serve:
            return HttpError(
                503,
                f"The node {name!r} loads the model {id_!r}",
                cause="loading",
                retry_after_s=retry_after_s(model.eta_s or 1.0),
                queueable=True,
                absent=model.percent is None,
                percent=model.percent,
                eta_s=model.eta_s,
            )
    if present:
        name, model = present[0]
        return HttpError(
            503,
            model.problem or f"The node {name!r} cannot load the model {id_!r}",
            cause="node_failed",
            remedy=f"see the log of llamasup on the node {name!r}",
        )
    if group.expected is not None:
        eta_s = group.expected.eta_s
        return HttpError(
            503,
            group.expected.message,
            cause="loading",
            retry_after_s=retry_after_s(eta_s or RETRY_S),
            queueable=True,
            eta_s=eta_s,
        )
    known = [nodes[name] for name in group.nodes if name in nodes]
    if all(node.peer.leaving for node in known):
        if any(node.state is NodeState.CONNECTING and not node.peer.leaving for node in nodes.values()):
            return HttpError(
                503,
                f"No node that has answered yet has the model {id_!r}",
                cause="node_absent",
                remedy="try again later",
                retry_after_s=RETRY_S,
                queueable=True,
            )
        return HttpError(404, f"The model {id_!r} does not exist any more", "invalid_request_error")
    final = all(node.state is NodeState.REFUSED for node in known)
    shown = " and ".join(f"the node {node.peer.name!r}" for node in known[:3])
    return HttpError(
        503,
        f"The model {id_!r} is on {shown}, which cannot be reached",
        cause="node_absent",
        remedy="llamasup status shows why" if final else "try again later",
        retry_after_s=None if final else RETRY_S,
        queueable=not final,
    )


# --- whether this node or other nodes get a request for a model that both have ------------------------


class Where(StrEnum):
    HERE = "here"
    ELSEWHERE = "elsewhere"


class Choice(Struct, frozen=True):
    where: Where
    reason: str


def choose_side(here: ServedLoad, elsewhere: ServedLoad) -> Choice:
    """Choose the side: a free permit here, else one elsewhere; else the only side where a request may wait;
    else the shorter queue of the serving sides; else where the model loads; else here.
    """
    if here.free:
        return Choice(Where.HERE, "this node has a free slot")
    if elsewhere.free and elsewhere.slots:
        return Choice(Where.ELSEWHERE, "another node has a free slot")
    if elsewhere.can_serve and not here.can_serve:
        full = "the queue of this node is full" if here.slots or here.loads else "this node cannot load it"
        return Choice(Where.ELSEWHERE, full)
    if here.can_serve and not elsewhere.can_serve:
        return Choice(Where.HERE, "only this node can take it")
    if here.slots and elsewhere.slots:
        if _turns(elsewhere) < _turns(here):
            return Choice(Where.ELSEWHERE, "all slots are busy, and the queue for other nodes is shorter")
        return Choice(Where.HERE, "all slots are busy, and the queue of this node is not longer")
    if here.slots:
        return Choice(Where.HERE, "only this node has it loaded")
    if elsewhere.slots:
        return Choice(Where.ELSEWHERE, "only other nodes have it loaded")
    if here.loads and elsewhere.loads:
        sooner = here.eta_s is not None and elsewhere.eta_s is not None and elsewhere.eta_s < here.eta_s
        if sooner:
            return Choice(Where.ELSEWHERE, "another node will have loaded it sooner")
        return Choice(Where.HERE, "this node loads it")
    if elsewhere.loads:
        return Choice(Where.ELSEWHERE, "another node loads it")
    return Choice(Where.HERE, "this node loads it" if here.loads else "no node has it loaded")


def _turns(side: ServedLoad) -> float:
    """Return how many requests are served before a new one, for each permit."""
    return (side.waiting + 1) / side.slots


# --- the list of models ------------------------------------------------------------------------------


def listed_remote(group: ModelGroup, nodes: Mapping[str, KnownNode]) -> ListedModel:
    """List a model that only other nodes have."""
    return ListedModel(group.model, partial(_entry, group, nodes))


def listed_shared(own: ListedModel, group: ModelGroup, nodes: Mapping[str, KnownNode]) -> ListedModel:
    """List a model that this node and other nodes have."""
    return ListedModel(own.model, lambda model: _with_nodes(own.render(model), group, nodes))


def _entry(group: ModelGroup, nodes: Mapping[str, KnownNode], model: ResolvedModel) -> dict[str, Any]:
    """The entry of a node that serves the model, else of one that gets requests, else of the first.

    The last one is what an absent node has reported, so the entry shows the state of the node.
    """
    entry: dict[str, Any] = {"object": "model", "created": 0, "owned_by": "llamasup", "tags": ()}
    present = [name for name in group.nodes if name in nodes and nodes[name].gets_requests]
    away = ""
    for name in (*warm(group, nodes), *present, *group.nodes)[:1]:
        entry |= group.nodes[name].entry
        if not present:  # during a stop, the membership may have dropped the node
            away = nodes[name].shown_state if name in nodes else NodeState.ABSENT.value
    entry |= {"id": model.id, "aliases": model.names[1:]}
    return _with_nodes(entry, group, nodes, away)


def _with_nodes(
    entry: dict[str, Any], group: ModelGroup, nodes: Mapping[str, KnownNode], away: str = ""
) -> dict[str, Any]:
    """Add the nodes. ``away`` is the state of the node of this entry, if no node gets requests."""
    own = entry.get("llamasup")
    shown: dict[str, Any] = dict(own) if isinstance(own, dict) else {}
    serves = bool(warm(group, nodes))
    if not group.is_local:
        shown["default"] = False
    if away:
        shown["state"] = away
    if serves or away or "status" not in entry:
        entry["status"] = {"value": ListedStatus.of(serves=serves).value}
    return {**entry, "llamasup": {**shown, "nodes": list(group.nodes)}}


# --- the sentences of ``llamasup why`` ---------------------------------------------------------------


def explain_nodes(group: ModelGroup, nodes: Mapping[str, KnownNode], queued: int) -> Explanation:
    """Explain a model on other nodes. ``queued``: the requests that wait here for these nodes."""
    sentences, change = [], []
    for name, model in group.nodes.items():
        known = nodes.get(name)
        if known is None or not known.gets_requests:
            reason = "" if known is None or not known.reason else f": {known.reason}"
            sentences.append(f"The node {name!r} has it, but gets no requests{reason}.")
            if known is not None and known.remedy:
                change.append(sentence(known.remedy))
        else:
            sentences.append(_of_node(name, model))
    if not group.nodes and group.expected is not None:
        sentences.append(f"{group.expected.message}.")
    if queued:
        sentences.append(f"{queued} {'request waits' if queued == 1 else 'requests wait'} for these nodes.")
    return Explanation(tuple(sentences), tuple(change))


def _of_node(name: str, model: NodeModel) -> str:
    if model.problem:
        return f"The node {name!r} cannot load it: {model.problem.rstrip('.')}."
    if model.serves:
        return f"The node {name!r} has it loaded: {model.busy} of {model.slots} slots are busy."
    progress = progress_text(model.percent, model.eta_s)
    shown = f" ({progress})" if progress else ""
    return f"On the node {name!r} it is {model.state}{shown}."
