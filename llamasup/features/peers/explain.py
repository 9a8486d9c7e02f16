"""Writes the sentences of ``llamasup why`` about a model on other nodes (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from llamasup.core.pool.catalog.node_listing import NodeModel
from llamasup.core.pool.why.state_reasons import Explanation
from llamasup.core.queueing.wait_estimate import progress_text
from llamasup.core.system.text import sentence
from llamasup.features.peers.groups import ModelGroup
from llamasup.features.peers.known import KnownNode


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
