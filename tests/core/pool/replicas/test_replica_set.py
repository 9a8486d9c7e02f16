"""A set of replicas: the choice for each request, the queue, and the errors while none serves."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from llamasup.core.http.address import UnixAddress
from llamasup.core.http.heads import HttpError
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.queueing.endpoint import BUSY, Endpoint, Lease
from llamasup.core.queueing.request_queue import QueueEntry
from llamasup.core.settings.model import NO_REPAIRS, Repairs
from llamasup.core.supervision.events import Bus
from llamasup.core.supervision.not_serving import NOT_RUNNING, STOPPING
from llamasup.core.supervision.plan_protocol import PlanMaker
from llamasup.core.supervision.runner import InstanceRunner
from llamasup.core.supervision.states import Policy, State
from tests.core.pool.pools import async_test
from tests.core.pool.replicas.replica_sets import LOADING, Replica, served_model
from tests.core.proxy.test_cost import REPEATS, Calls

SWAPPING = HttpError(503, "Another model has its memory", cause="making_room", queueable=True)
TO_BE_LOADED = HttpError(503, "Not loaded", cause="not_loaded", queueable=True)
STOPPED = HttpError(503, "The model is not running", cause="stopped")
FAILED = HttpError(503, "It crashed too often", cause="killed", remedy="see the log", retry_after_s=300.0)


def idle_runner(served: ReplicaSet, folder: Path = Path("/nowhere")) -> InstanceRunner:
    """A real runner that has no request to start yet."""
    planner: PlanMaker = object()  # type: ignore[assignment]
    runner = InstanceRunner(
        "tiny", planner, policy=Policy(), bus=Bus(), queue=served.queue, work_folder=folder, log_path=None
    )
    served.add(runner)
    return runner


class Client:
    """A request that queues if necessary, and keeps its lease or its rejection."""

    def __init__(self, served: ReplicaSet, body: bytes = b"", *, infers: bool = True) -> None:
        self.served_model = served
        self.body = body
        self.lease: Lease | None = None
        self.why: HttpError | None = None
        self.entry = QueueEntry(self, 0.0, len(body), needs_permit=infers)
        found = served.lease(infers=infers, body=body)
        if isinstance(found, Lease):
            self.lease = found
        elif found.queueable:
            self.why = served.queue.enter(self.entry)
        else:
            self.why = found

    def served(self, lease: Lease) -> None:
        self.lease = lease

    def refused(self, why: HttpError) -> None:
        self.why = why

    @property
    def waits(self) -> bool:
        return self.entry.waits

    @property
    def at(self) -> Endpoint:
        assert self.lease is not None
        return self.lease.endpoint

    def goes(self) -> None:
        assert self.lease is not None
        self.lease.release()

    def is_broken_off(self) -> bool:
        """The server has exited without an answer. Returns whether the request is queued again."""
        lease, self.lease = self.lease, None
        assert lease is not None
        taken = self.served_model.queue.requeue(self.entry, lease.endpoint, sent=True, alone=lease.alone)
        lease.release()
        return taken


def two(max_concurrent: int = 2, policy: Policy | None = None) -> tuple[ReplicaSet, Endpoint, Endpoint]:
    served = served_model(policy)
    first, second = (Replica(served, f"/run/{n}.sock", max_concurrent=max_concurrent) for n in (1, 2))
    return served, first.becomes_ready(), second.becomes_ready()


def talk(*turns: str) -> bytes:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return json.dumps({"model": "tiny", "messages": messages}).encode()


# --- one process


@async_test
async def test_queue_outlives_a_process() -> None:
    served = served_model()
    old = Replica(served)
    client = Client(served)
    assert client.waits
    old.becomes(STOPPED, leaving=True)
    assert client.why == STOPPED  # no other process was announced
    served.explain(TO_BE_LOADED)
    client = Client(served)
    served.remove(old)
    served.remove(old)
    assert client.waits
    new = Replica(served)
    assert client.waits
    assert client.lease is None
    endpoint = new.becomes_ready()
    assert client.at is endpoint


@async_test
async def test_reason_without_a_process_is_the_owners() -> None:
    served = served_model()
    assert served.lease() is NOT_RUNNING
    served.explain(TO_BE_LOADED)
    assert served.lease() is TO_BE_LOADED
    client = Client(served)
    assert client.waits
    served.explain(FAILED)
    assert (client.why, served.serving()) == (FAILED, FAILED)


@async_test
async def test_leaving_runner_does_not_give_the_reason() -> None:
    served = served_model()
    served.explain(TO_BE_LOADED)
    runner = Replica(served)
    runner.becomes(STOPPED, leaving=True)
    assert served.lease() is TO_BE_LOADED
    runner.becomes(FAILED)
    assert served.lease() is FAILED


def test_cancelled_runner_is_leaving(tmp_path: Path) -> None:
    async def test() -> None:
        served = served_model()
        runner = idle_runner(served, tmp_path)
        assert served.lease() is NOT_RUNNING
        runner.instance = replace(runner.instance, state=State.READY, restart_pending=True)  # no child
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(runner.run())
            client = Client(served)
            await asyncio.sleep(0)
            assert client.waits
            running.cancel()
        assert client.why is STOPPING
        served.explain(TO_BE_LOADED)
        assert served.lease() is TO_BE_LOADED

    asyncio.run(test())


@async_test
async def test_retry_time_of_a_failure_is_the_retrying_ones() -> None:
    served = served_model()
    runner = idle_runner(served)
    failed = replace(runner.instance, state=State.FAILED)
    runner.instance = failed
    why = served.lease()
    assert isinstance(why, HttpError)
    assert (why.message, why.queueable) == ("llama-server ended", False)  # the owner gives no reason
    served.explain(STOPPED)
    assert served.lease() is STOPPED
    diagnosis = Diagnosis(
        "model_missing", "The file '/secret place/m.gguf' cannot be opened.", "", (), True, 66
    )
    runner.instance = replace(failed, last=diagnosis)
    served.explain(None)
    why = served.lease()
    assert isinstance(why, HttpError)
    assert why.message == "The file 'm.gguf' cannot be opened."
    runner.instance = replace(failed, next_start_s=asyncio.get_running_loop().time() + 300.0)
    why = served.lease()
    assert isinstance(why, HttpError)
    assert why.retry_after_s == pytest.approx(300.0, abs=1.0)


@async_test
async def test_retry_after_of_a_failure_decreases() -> None:
    now_s = 100.0
    served = ReplicaSet(policy=Policy(), clock=lambda: now_s)
    served.explain(FAILED, 400.0)
    assert served.lease() == replace(FAILED, retry_after_s=300.0)
    now_s = 390.0
    assert served.lease() == replace(FAILED, retry_after_s=10.0)
    served.explain(TO_BE_LOADED)
    assert served.lease() is TO_BE_LOADED


@async_test
async def test_queue_limits_can_change_while_requests_wait() -> None:
    served = served_model()
    runner = Replica(served)
    waits = Client(served)
    impatient = Policy(wait_timeout_s=0.0, drain_timeout_s=1.0)
    served.apply_policy(impatient)
    assert waits.waits
    assert Client(served).why is LOADING
    assert runner.policy is impatient


@async_test
async def test_new_permits_of_a_running_process_are_used() -> None:
    served = served_model()
    runner = idle_runner(served)
    runner.instance = replace(runner.instance, state=State.READY)
    endpoint = Endpoint(
        "tiny", 1, UnixAddress("/run/1.sock"), max_concurrent=1, on_permit_free=served.queue.permit_freed
    )
    plan = SimpleNamespace(parallel=1)
    runner._generation = SimpleNamespace(endpoint=endpoint, exit=None, plan=plan)  # type: ignore[assignment]
    assert Client(served).lease is not None
    waits, waits_on = Client(served), Client(served)
    served.apply_policy(Policy(max_concurrent=2))
    assert waits.lease is not None
    assert waits_on.waits
    served.apply_policy(Policy(max_concurrent=1))
    waits.lease.release()
    assert waits_on.waits


def test_lease_of_the_only_replica_costs_few_calls(tmp_path: Path) -> None:
    """Every request takes a lease, so the code for several replicas must not slow it down."""
    served = served_model()
    runner = idle_runner(served, tmp_path)
    endpoint = Endpoint("tiny", 1, UnixAddress("/run/1.sock"))
    runner.instance = replace(runner.instance, state=State.READY)
    runner._generation = SimpleNamespace(endpoint=endpoint, exit=None)  # type: ignore[assignment]
    calls, body = Calls(), talk("a" * 50)

    def lease() -> None:
        for _ in range(REPEATS):
            served.lease(infers=True, body=body)

    calls.count(lease)
    assert endpoint.in_flight == REPEATS
    # Python: model, runner (2), endpoint (2), lease (2). C: set.add, monotonic, isinstance.
    assert calls.per_repeat() <= (7, 3), calls


@async_test
async def test_waiting_request_goes_to_the_replica_that_has_its_conversation() -> None:
    served, first, second = two(max_concurrent=1)
    one, other = Client(served, talk("one", "x", "y")), Client(served, talk("other", "x", "y"))
    assert (one.at, other.at) == (first, second)
    new = Client(served, talk("new"))
    of_other = Client(served, talk("other", "x", "y", "z", "next"))
    of_one = Client(served, talk("one", "x", "y", "z", "next"))
    other.goes()
    assert new.at is second  # it is first, and in no cache
    one.goes()
    assert (of_one.at, of_other.waits) == (first, True)
    assert of_one.entry.notes is None  # it keeps no body while it is answered
    new.goes()
    assert of_other.at is second


@async_test
async def test_replica_is_not_left_idle_for_a_conversation_elsewhere() -> None:
    served, first, second = two(max_concurrent=1)
    one, other = Client(served, talk("one", "x", "y")), Client(served, talk("other", "x", "y"))
    assert (one.at, other.at) == (first, second)
    waits = [Client(served, talk("one", "x", "y", str(number))) for number in range(2)]
    without = Client(served, b"{}")
    other.goes()
    assert without.at is second
    without.goes()
    assert waits[0].at is second


# --- pause and resume


@async_test
async def test_paused_set_grants_no_leases_until_it_resumes() -> None:
    served = served_model()
    endpoint = Replica(served, max_concurrent=1).becomes_ready()
    early = Client(served)
    served.pause(SWAPPING)
    assert served.is_paused
    late = Client(served)
    early.goes()
    assert (late.waits, endpoint.in_flight, served.lease()) == (True, 0, SWAPPING)
    served.resume()
    assert late.at is endpoint
    assert not served.is_paused


@async_test
async def test_final_pause_rejects_the_queue_and_requeues_nothing() -> None:
    served = served_model()
    Replica(served, max_concurrent=1).becomes_ready()
    early, waits = Client(served), Client(served)
    served.pause(FAILED)
    assert (waits.why, Client(served).why) == (FAILED, FAILED)
    assert not early.is_broken_off()


# --- callbacks of the owner


@async_test
async def test_on_wanted_is_called_while_nothing_serves() -> None:
    queue_lengths: list[int] = []
    served = ReplicaSet(policy=Policy(), on_wanted=lambda: queue_lengths.append(len(served.queue)))
    served.explain(TO_BE_LOADED)
    assert served.queue.oldest_s == float("inf")
    began_s = asyncio.get_running_loop().time()
    Client(served)
    oldest_s = served.queue.oldest_s
    Client(served)
    assert queue_lengths == [1, 2]
    assert began_s <= served.queue.oldest_s == oldest_s <= asyncio.get_running_loop().time()
    runner = Replica(served, max_concurrent=1)
    runner.becomes_ready()
    runner.becomes(LOADING)
    queue_lengths.clear()
    runner.becomes_ready()
    Client(served)
    Client(served)
    assert queue_lengths == []  # they wait for a permit, and a replica serves


@async_test
async def test_on_unserved_gets_each_rejection() -> None:
    told: list[tuple[int, str]] = []
    served = ReplicaSet(
        policy=Policy(),
        on_unserved=lambda why: told.append((len(served.queue), "" if why is None else why.cause)),
    )
    served.explain(TO_BE_LOADED)
    first, second, third = Client(served), Client(served), Client(served)
    served.queue.leave(second.entry)
    served.queue.leave(second.entry)
    assert told == [(2, "")]
    runner = Replica(served, max_concurrent=1)
    runner.becomes_ready()
    assert first.lease is not None
    assert told == [(2, "")]  # no call for a served request
    served.pause(STOPPING)
    assert (third.why, told) == (STOPPING, [(2, ""), (0, "stopping")])


@async_test
async def test_change_in_on_wanted_counts_after_enter() -> None:
    """The callback can find, while the request enters, that the model is ready or can never be loaded."""
    served = ReplicaSet(policy=Policy(), on_wanted=lambda: serves())
    served.explain(TO_BE_LOADED)

    def serves() -> None:
        Replica(served).becomes_ready()

    client = Client(served)
    assert (client.waits, client.lease) == (True, None)
    await asyncio.sleep(0.001)
    assert client.lease is not None


@async_test
async def test_on_idle_is_called_after_the_last_request_of_all() -> None:
    idle: list[float] = []
    served = ReplicaSet(policy=Policy(), on_idle=lambda: idle.append(served.idle_since_s))
    for n in (1, 2):
        Replica(served, f"/run/{n}.sock", max_concurrent=1).becomes_ready()
    clients = [Client(served), Client(served)]
    waits = Client(served)
    assert (served.in_flight, served.idle_since_s) == (2, 0.0)
    clients[0].goes()
    assert (waits.lease is not None, idle) == (True, [])  # it got its permit before the set was idle
    clients[1].goes()
    assert idle == []
    waits.goes()
    assert idle == [served.idle_since_s]
    assert served.idle_since_s > 0.0
    waits.goes()
    assert len(idle) == 1


# --- several replicas: the choice


@async_test
async def test_new_requests_go_to_the_lowest_share_of_permits() -> None:
    served = served_model()
    small = Replica(served, "/run/1.sock", max_concurrent=1).becomes_ready()
    large = Replica(served, "/run/2.sock", max_concurrent=4).becomes_ready()
    for _ in range(5):
        Client(served)
    assert (small.busy, large.busy) == (1, 4)
    assert served.lease(infers=True) is BUSY
    assert isinstance(served.lease(infers=False), Lease)


@async_test
async def test_new_conversations_go_to_idle_replicas_in_turn() -> None:
    served, first, second = two()
    visited = []
    for n in range(4):
        client = Client(served, talk(f"question {n}"))
        visited.append(client.at)
        client.goes()
    assert visited == [first, second, first, second]


@async_test
async def test_conversation_stays_on_its_replica() -> None:
    served, first, second = two(max_concurrent=2)
    one = Client(served, talk("a" * 50))
    other = Client(served, talk("b" * 50))
    assert (one.at, other.at) == (first, second)
    one.goes()
    other.goes()
    for _ in range(3):  # whatever was used last
        client = Client(served, talk("b" * 50, "yes", "and?"))
        assert client.at is second
        client.goes()
    client = Client(served, talk("a" * 50, "no", "but?"))
    assert client.at is first


@async_test
async def test_conversation_moves_from_a_much_busier_replica() -> None:
    served, first, second = two(max_concurrent=4)
    Client(served, talk("a" * 50)).goes()
    for _ in range(3):  # three more requests exceed the other replica by no more than half of the permits
        assert Client(served, talk("a" * 50, "yes", "and?")).at is first
    client = Client(served, talk("a" * 50, "yes", "and?"))
    assert client.at is second
    client.goes()
    assert Client(served, talk("a" * 50, "yes", "and?", "so", "on")).at is second


@async_test
async def test_waiting_request_gets_the_first_free_permit() -> None:
    served, first, second = two(max_concurrent=1)
    Client(served, talk("a" * 50)).goes()
    one, other = Client(served), Client(served)
    assert {one.at, other.at} == {first, second}
    waits = Client(served, talk("a" * 50, "yes", "and?"))
    served.pause(SWAPPING)
    one.goes()
    other.goes()
    served.resume()
    assert waits.at is first


@async_test
async def test_free_permit_of_any_replica_serves_the_next() -> None:
    served, first, second = two(max_concurrent=1)
    clients = {client.at: client for client in (Client(served), Client(served))}
    waits = [Client(served) for _ in range(2)]
    clients[second].goes()
    assert (waits[0].at, waits[1].waits) == (second, True)
    clients[first].goes()
    assert waits[1].at is first


# --- several replicas: the end of one


@async_test
async def test_broken_request_goes_to_another_replica_at_once() -> None:
    served, first, second = two(max_concurrent=2)
    client = Client(served)
    assert client.at is first
    assert client.is_broken_off()
    assert client.waits
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.at is second
    # New requests avoid the broken replica too, although the runner notices its end later.
    waits = Client(served)
    assert (waits.waits, second.taken) == (True, 1)  # nothing runs beside a suspect
    client.goes()
    assert (waits.at, first.busy) == (second, 0)


@async_test
async def test_request_is_retried_once_on_any_replica() -> None:
    served, _, _ = two(max_concurrent=2)
    client = Client(served)
    assert client.is_broken_off()
    await asyncio.sleep(0.001)
    assert not client.is_broken_off()


@async_test
async def test_request_that_may_not_wait_is_retried_on_another() -> None:
    served, first, second = two(max_concurrent=2, policy=Policy(wait_timeout_s=0.0))
    client = Client(served)
    assert client.is_broken_off()
    await asyncio.sleep(0.001)
    assert client.at is second
    alone = served_model(Policy(wait_timeout_s=0.0))
    Replica(alone).becomes_ready()
    assert not Client(alone).is_broken_off()
    assert first.busy == 0


@async_test
async def test_new_requests_use_ejected_replicas_and_queued_do_not() -> None:
    served, first, second = two(max_concurrent=2)
    clients = [Client(served), Client(served)]
    assert all(client.is_broken_off() for client in clients)
    await asyncio.sleep(0.001)
    assert all(client.waits for client in clients)
    assert Client(served).at in {first, second}


@async_test
async def test_single_ready_replica_still_records_conversations() -> None:
    served = served_model()
    one, other = (Replica(served, f"/run/{n}.sock", max_concurrent=4) for n in (1, 2))
    first = one.becomes_ready()
    Client(served, talk("a" * 50)).goes()
    other.becomes_ready()
    assert Client(served, talk("a" * 50, "yes", "and?")).at is first
    one.becomes(LOADING)
    again = one.becomes_ready()
    assert again is not first
    assert Client(served, talk("a" * 50, "yes", "and?")).at is not first  # its caches are lost


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ((FAILED, LOADING), LOADING),
        ((LOADING, HttpError(503, "soon", retry_after_s=1.0, queueable=True)), "soon"),
        ((STOPPED, FAILED), FAILED),
    ],
)
def test_reason_is_the_soonest_then_the_most_helpful(
    says: tuple[HttpError, HttpError], told: HttpError | str
) -> None:
    served = served_model()
    for n, why in enumerate(says):
        Replica(served, f"/run/{n}.sock").becomes(why)
    heard = served.serving()
    assert isinstance(heard, HttpError)
    assert heard is told or heard.message == told


@async_test
async def test_full_model_counts_requests_of_all_replicas() -> None:
    served, first, second = two(max_concurrent=1, policy=Policy(max_queued=1))
    first.held_s, second.held_s = 10.0, 30.0
    clients = [Client(served) for _ in range(4)]
    why = clients[3].why
    assert why is not None
    assert why.message == "The model is busy with 2 requests, and 1 more waits"
    assert why.retry_after_s == 10.0  # two requests end every 20 s, and each gives room to one


IMPORTED = """
import sys
from llamasup.core.pool.replicas.replica_set import ReplicaSet
from llamasup.core.settings.model import NO_REPAIRS, Repairs
from llamasup.core.supervision.states import Policy
json = Policy(repairs=Repairs(json=True))
"""


def test_policy_says_what_is_repaired() -> None:
    served = ReplicaSet(policy=Policy(repairs=Repairs(json=True)))
    assert served.repairs == Repairs(json=True)
    served.apply_policy(Policy())
    assert served.repairs is NO_REPAIRS


@pytest.mark.parametrize(
    ("code", "is_imported"),
    [
        ("ReplicaSet(policy=json)", True),
        ("ReplicaSet(policy=Policy()).apply_policy(json)", True),
        ("ReplicaSet(policy=Policy(repairs=Repairs(tool_calls=True)))", False),
    ],
)
def test_no_request_waits_for_the_import_of_its_check(code: str, *, is_imported: bool) -> None:
    code = f"{IMPORTED}{code}\nprint('jsonschema' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{is_imported}\n"
