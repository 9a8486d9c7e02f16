"""Keeps the nodes of a fleet and the requests that wait at its fronts (pure). Owned by ``Directory``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Final

from llamasup.fleet.messages import SETTLED_AFTER_S, FleetNode, ListedModel, NodeReport, Poll, Snapshot

GONE_AFTER_S: Final = 30.0
"""A node reports each second, unless its machine or Ray is very busy. Long, because a node that is not listed
gets no new requests; fronts see by themselves, in seconds, that a node does not answer.
"""
ROOM_AFTER_S: Final = 10.0
"""How long the process of a replica may take to begin before a sleeping one makes room: Serve (2.60) does not
say whether a replica waits for a place or for its Python. With two cores and a load of 12, Python took 4 s.
"""
_ENDS_WITHIN_S: Final = 20.0  # a node that makes room begins to leave
_FRESH_S: Final = 5.0  # a node that has not reported, or not woken, for as long may be gone
_NEXT_ROUND_S: Final = 600.0
"""How long a model waits after all sleeping nodes were asked in vain: it may fit on no machine."""
_FRONT_GONE_AFTER_S: Final = 45.0  # a front polls at least each 20 s


class DirectoryTable:
    """The state of a directory. Times are monotonic. ``version`` grows over restarts if ``first_version``
    does. ``min_replicas``: by model, where it is above 0.
    """

    def __init__(
        self,
        models: Iterable[ListedModel],
        ca: str,
        *,
        now_s: float,
        first_version: int,
        min_replicas: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._models = {model.id: model for model in models}
        self._min_replicas = min_replicas
        self._ca = ca
        self._settled_at_s = now_s + SETTLED_AFTER_S
        self._settled = False
        self._nodes: dict[str, tuple[NodeReport, float]] = {}
        self._leaving: set[str] = set()
        # Nodes that load: the model, and the last sign of life.
        self._starting: dict[str, tuple[str, float]] = {}
        self._ended_s: dict[str, float] = {}  # nodes that ended lately
        self._asleep_since_s: dict[str, float] = {}
        self._woken_s: dict[str, float] = {}  # sleeping nodes that should wake, and since when
        self._unplaced_since_s: dict[str, float] = {}  # models with replicas that Ray has not placed yet
        self._makes_room: dict[str, float] = {}  # sleeping nodes that should end, and since when
        self._room_made_s = now_s
        self._asked_for: set[str] = set()  # models for which a node was asked in this round
        self._in_vain_s: dict[str, float] = {}  # models that a round gave no place, and when it ended
        self._fronts: dict[str, tuple[Poll, float]] = {}
        self._wanted_since_s: dict[str, float] = {}
        self._problems: dict[str, str] = {}  # why no node starts, by the model
        self._start_s: dict[str, float] = {}  # how long the last start from zero took
        self.version = first_version

    # --- nodes --------------------------------------------------------------------------------------------

    def starts(self, report: NodeReport, now_s: float) -> None:
        """Ray has placed the node, which loads its model. A later call may have overtaken this one."""
        if report.name not in self._nodes and report.name not in self._ended_s:
            self._starting[report.name] = report.model, now_s

    def report(self, report: NodeReport, now_s: float) -> bool:
        """Note a report. True if the snapshot changes."""
        before = self._nodes.get(report.name)
        self._nodes[report.name] = report, now_s
        self._starting.pop(report.name, None)
        if report.load.asleep:
            self._asleep_since_s.setdefault(report.name, now_s)
        else:
            self._asleep_since_s.pop(report.name, None)
            self._woken_s.pop(report.name, None)
            if report.name not in self._leaving:
                self._makes_room.pop(report.name, None)
        self._problems.pop(report.model, None)
        if before is not None and before[0].url == report.url:
            return False
        if (since_s := self._wanted_since_s.pop(report.model, None)) is not None:
            self._start_s[report.model] = now_s - since_s
        self.version += 1
        return True

    def leave(self, report: NodeReport, now_s: float) -> None:
        """The node takes no new requests. A directory that has just started learns of the node only now,
        while fronts may still send it requests.
        """
        self._nodes[report.name] = report, now_s
        self._leaving.add(report.name)
        self.version += 1

    def end(self, node: str, now_s: float) -> bool:
        """The node has ended. True if the snapshot changes."""
        self._starting.pop(node, None)
        self._ended_s[node] = now_s
        if node not in self._nodes:
            return False
        self._forget(node, now_s)
        self.version += 1
        return True

    def _forget(self, node: str, now_s: float) -> None:
        self._leaving.discard(node)
        self._asleep_since_s.pop(node, None)
        self._woken_s.pop(node, None)
        if self._makes_room.pop(node, None) is not None:
            self._room_made_s = now_s
        del self._nodes[node]

    def note_problem(self, model: str, problem: str) -> bool:
        """Note why no node of the model starts. True if the snapshot changes."""
        if model in self._serving_models() or self._problems.get(model) == problem:
            return False
        self._problems[model] = problem
        self.version += 1
        return True

    def backlog(self, node: str) -> float:
        """Return the share of a node in the requests that wait for its model at the fronts."""
        known = self._nodes.get(node)
        if known is None or node in self._leaving:
            return 0.0
        model = known[0].model
        return self._waiting()[model] / len(self._serving(model))

    def should_wake(self, node: str, now_s: float) -> bool:
        """Tell whether a sleeping node should load its model, because the awake nodes lack slots.

        Only as many nodes as needed wake; the node that has slept for the shortest time is first. A node that
        does not report, or does not wake, is not counted. If no node is awake, a front sends a request, which
        loads the model on one node.
        """
        if node not in self._asleep_since_s or node in self._leaving:
            return False
        nodes = self._serving(self._nodes[node][0].model)
        awake = [report.load for report in nodes if not report.load.asleep]
        if not awake:
            return False
        requests = self._waiting()[nodes[0].model] + sum(load.busy + load.queued for load in awake)
        lacking = requests - sum(load.slots for load in awake)
        asleep = [report for report in nodes if report.load.asleep]
        asleep.sort(key=lambda report: -self._asleep_since_s[report.name])
        before = takewhile(lambda report: report.name != node, asleep)
        lacking -= sum(report.load.slots for report in before if self._will_wake(report.name, now_s))
        if lacking <= 0:
            return False
        self._woken_s.setdefault(node, now_s)
        return True

    def _will_wake(self, node: str, now_s: float) -> bool:
        reported_s, woken_s = self._nodes[node][1], self._woken_s.get(node, now_s)
        return now_s - reported_s < _FRESH_S and now_s - woken_s < _FRESH_S

    def _serving(self, model: str) -> list[NodeReport]:
        """Return the nodes of the model that do not leave."""
        return [
            report
            for report, _ in self._nodes.values()
            if report.model == model and report.name not in self._leaving
        ]

    def expire(self, now_s: float) -> bool:
        """Forget nodes and fronts without a sign of life. True if the snapshot changes."""
        gone = [name for name, (_, at_s) in self._nodes.items() if now_s - at_s > GONE_AFTER_S]
        for name in gone:
            self._forget(name, now_s)
        for name in [n for n, (_, at_s) in self._starting.items() if now_s - at_s > GONE_AFTER_S]:
            del self._starting[name]
        self._ended_s = {name: s for name, s in self._ended_s.items() if now_s - s <= GONE_AFTER_S}
        for front in [f for f, (_, at_s) in self._fronts.items() if now_s - at_s > _FRONT_GONE_AFTER_S]:
            del self._fronts[front]
        settles = not self._settled and now_s >= self._settled_at_s
        self._settled = self._settled or settles
        if not gone and not settles:
            return False
        self.version += 1
        return True

    # --- room ---------------------------------------------------------------------------------------------

    @property
    def has_sleeping(self) -> bool:
        return bool(self._asleep_since_s)

    @property
    def lacks_room(self) -> bool:
        """Whether a replica has no place yet."""
        return bool(self._unplaced_since_s)

    def note_starting(self, replicas: Mapping[str, int], now_s: float) -> None:
        """Note how many replicas of each model start, according to Serve."""
        placed = Counter(model for model, _ in self._starting.values())
        self._unplaced_since_s = {
            model: self._unplaced_since_s.get(model, now_s)
            for model, number in replicas.items()
            if number > placed[model]
        }
        self._in_vain_s = {
            model: ended_s
            for model, ended_s in self._in_vain_s.items()
            if model in self._unplaced_since_s and now_s - ended_s < _NEXT_ROUND_S
        }
        self._asked_for &= self._unplaced_since_s.keys()
        self._end_rounds(now_s)
        if not self._unplaced_since_s.keys() - self._in_vain_s.keys():
            leaving = self._makes_room.keys() & self._leaving
            self._makes_room = {node: self._makes_room[node] for node in leaving}

    def _end_rounds(self, now_s: float) -> None:
        if self._is_being_made(now_s):
            return
        candidates = self._can_make_room(now_s - GONE_AFTER_S)
        for model in [m for m in self._asked_for if not self._for_model(m, candidates)]:
            self._asked_for.discard(model)
            self._in_vain_s[model] = now_s

    def makes_room(self, node: str, now_s: float) -> bool:
        """Tell whether a sleeping node should end, because Ray has found no place for a replica since
        ``ROOM_AFTER_S``. The node that has slept longest is first. If that did not help, another one follows,
        until each was asked once.
        """
        if node in self._makes_room:
            return True
        if self._is_being_made(now_s):
            return False
        candidates = self._can_make_room(now_s - _FRESH_S)
        models = {
            model
            for model, since_s in self._unplaced_since_s.items()
            if now_s - since_s >= ROOM_AFTER_S and model not in self._in_vain_s
        }
        first = {next(iter(self._for_model(model, candidates)), None) for model in models}
        if node not in first:
            return False
        self._asked_for |= {model for model in models if node in self._for_model(model, candidates)}
        self._makes_room[node] = now_s
        return True

    def _is_being_made(self, now_s: float) -> bool:
        """Tell whether a node that was asked may still end, or Ray may just be using the room of one."""
        asked_s = max(self._makes_room.values(), default=now_s - _ENDS_WITHIN_S)
        ends = self._makes_room.keys() & self._leaving & self._asleep_since_s.keys()
        return now_s - asked_s < _ENDS_WITHIN_S or bool(ends) or now_s - self._room_made_s < ROOM_AFTER_S

    def _can_make_room(self, reported_s: float) -> list[str]:
        """List the sleeping nodes that could leave and were not asked yet, the longest asleep first.
        ``reported_s``: the oldest last report that counts.
        """
        stay = Counter(
            report.model
            for report, _ in self._nodes.values()
            if report.name not in self._leaving and report.name not in self._makes_room
        )
        found = []
        for name, since_s in self._asleep_since_s.items():
            report, at_s = self._nodes[name]
            is_asked = name in self._leaving or name in self._makes_room
            more = stay[report.model] > self._min_replicas.get(report.model, 0)
            if more and not is_asked and at_s >= reported_s:
                found.append((since_s, name))
        return [name for _, name in sorted(found)]

    def _for_model(self, model: str, candidates: Iterable[str]) -> list[str]:
        """Leave out the nodes of the model itself: a sleeping one can serve it."""
        return [node for node in candidates if self._nodes[node][0].model != model]

    # --- fronts -------------------------------------------------------------------------------------------

    def poll(self, poll: Poll, now_s: float) -> bool:
        """Note a poll, which also reports what the front has seen. One that a later poll has overtaken counts
        only as a sign of life. True if the snapshot changes.
        """
        before = self._fronts.get(poll.front)
        if before is not None and before[0].number > poll.number:
            poll = before[0]
        self._fronts[poll.front] = poll, now_s
        wanted = self.wanted().keys()
        if wanted == self._wanted_since_s.keys():
            return False
        self._wanted_since_s = {model: self._wanted_since_s.get(model, now_s) for model in wanted}
        self.version += 1
        return True

    def all_have_seen(self, version: int) -> bool:
        """Tell whether no front can still send requests to a node that left in ``version``.

        Not known before the directory has settled: a front may not have polled it yet.
        """
        return self._settled and all(poll.seen >= version for poll, _ in self._fronts.values())

    def wanted(self) -> Mapping[str, int]:
        """The waiting requests of all fronts, for each model of the fleet that has no node."""
        served = self._serving_models()
        return {model: number for model, number in self._waiting().items() if model not in served}

    def _waiting(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for poll, _ in self._fronts.values():
            total.update({model: n for model, n in poll.waiting.items() if n > 0 and model in self._models})
        return total

    def _serving_models(self) -> frozenset[str]:
        return frozenset(
            report.model for report, _ in self._nodes.values() if report.name not in self._leaving
        )

    # --- views --------------------------------------------------------------------------------------------

    def nodes(self) -> tuple[tuple[NodeReport, bool], ...]:
        """The latest report of each node, and whether it leaves."""
        return tuple((report, report.name in self._leaving) for report, _ in self._nodes.values())

    def snapshot(self, now_s: float) -> Snapshot:
        nodes = (
            FleetNode(report.name, report.url, report.model, leaving) for report, leaving in self.nodes()
        )
        return Snapshot(
            self.version,
            self._settled,
            self._ca,
            tuple(sorted(nodes, key=lambda node: node.name)),
            tuple(
                ListedModel(
                    model.id,
                    model.aliases,
                    self._eta_s(model.id, now_s),
                    self._problems.get(model.id, ""),
                    model.id in self._wanted_since_s,
                )
                for model in self._models.values()
            ),
        )

    def _eta_s(self, model: str, now_s: float) -> float | None:
        start_s = self._start_s.get(model)
        if start_s is None or model in self._problems:  # Ray tries again, at times that it does not tell
            return None
        left_s = start_s - (now_s - self._wanted_since_s.get(model, now_s))
        return left_s if left_s > 0.0 else None  # it takes longer than the last one
