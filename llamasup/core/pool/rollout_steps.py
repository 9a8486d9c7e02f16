"""The steps of a swap: the processes of a new spec replace the old ones (pure).

If both fit into memory and need no RPC workers, the new ones start beside the old ones, which then finish
their requests. Otherwise the old ones stop first, and are started again if the new ones fail.

The processes of an unproven build start beside the old ones or not at all, and get no requests until the
build has proven itself. If it is refused, they stop, and the old ones have served all the time.
"""

from __future__ import annotations

from msgspec.structs import replace

from llamasup.core.pool.model_states import (
    Admit,
    Announce,
    Disproven,
    Drop,
    Estimate,
    Model,
    ModelState,
    Processes,
    ProcessesFailed,
    ProcessesReleased,
    ProcessesServing,
    ProcessesStarting,
    ProcessesStatus,
    Prove,
    Proven,
    Reload,
    Rollout,
    RolloutStep,
    Start,
    Stop,
    SwapGranted,
    Withdraw,
)
from llamasup.core.pool.model_steps import (
    Outcome,
    begin_rollout,
    end_rollout,
    fail,
    forget_spec,
    release,
    settle,
    stop_processes,
    with_status,
)
from llamasup.core.supervision.events import ModelUnloading
from llamasup.errors import BuildUnproven, DoesNotFit, LlamasupError


def _rollout(model: Model) -> Rollout:
    assert model.rollout is not None  # the table has these steps only for a swap
    return model.rollout


def _start(model: Model, sized: Estimate, rollout: Rollout, *, withheld: bool = False) -> Outcome:
    id_ = model.made + 1
    started = replace(model, made=id_, current=Processes(id_), sized=sized, rollout=rollout)
    return started, (Start(id_, sized, withheld),)


def swap(model: Model, event: SwapGranted) -> Outcome:
    rollout, current = model.rollout, model.current
    if rollout is None or rollout.step is not RolloutStep.WAITING or current is None:
        return model, ()  # the rollout ended, or its spec is sized again
    assert rollout.target is not None
    is_beside = event.fits and not _has_workers(model, rollout.target)
    if rollout.target.spec.unproven:
        if not is_beside:
            return end_rollout(model, _no_room_to_prove(model))
        if current.status is not ProcessesStatus.SERVING:
            return model, ()  # until there is something to compare with
    model = replace(model, state=ModelState.ROLLING_OUT, for_id="")
    if is_beside and current.status is ProcessesStatus.SERVING:
        beside = replace(model, old=current, old_sized=model.sized)
        build = "" if model.sized is None else model.sized.spec.runtime
        started = replace(rollout, step=RolloutStep.BESIDE, build=build)
        return _start(beside, rollout.target, started, withheld=rollout.target.spec.unproven)
    stopping = replace(rollout, step=RolloutStep.STOPPING, before=model.sized)
    model, stops = stop_processes(replace(model, rollout=stopping))
    return model, (Announce(ModelUnloading(model.spec.id, "changed")), *stops)


def _no_room_to_prove(model: Model) -> DoesNotFit:
    return DoesNotFit(
        f"The new build cannot prove itself with {model.spec.id!r}: it does not fit beside the running one.",
        remedy="Unload other models, and try again.",
    )


def _has_workers(model: Model, target: Estimate) -> bool:
    """A worker serves one llama-server: the new processes would start without those of the old ones."""
    old = model.sized
    return bool(target.spec.settings.rpc or (old is not None and old.spec.settings.rpc))


def still_starting(model: Model, event: ProcessesStarting) -> Outcome:
    return with_status(model, event.id, ProcessesStatus.STARTING), ()


def still_serving(model: Model, event: ProcessesServing) -> Outcome:
    return with_status(model, event.id, ProcessesStatus.SERVING), ()


def promote(model: Model, event: ProcessesServing) -> Outcome:
    """Side by side: the new processes get the requests once all replicas have started, or failed."""
    model = with_status(model, event.id, ProcessesStatus.SERVING)
    if model.is_old(event.id) or not event.complete:
        return model, ()
    rollout = _rollout(model)
    assert rollout.target is not None
    if not rollout.target.spec.unproven:
        return _replace_old(model)
    if model.old is None or model.old.status is not ProcessesStatus.SERVING:
        return disproven(model, Disproven(event.id, _nothing_to_compare(model)))
    proving = replace(model, rollout=replace(rollout, step=RolloutStep.PROVING))
    return proving, (Prove(event.id, model.old.id),)


def _nothing_to_compare(model: Model) -> BuildUnproven:
    return BuildUnproven(
        f"The new build cannot prove itself with {model.spec.id!r}: the running processes have ended.",
        remedy="Try again later.",
    )


def starting_while_proving(model: Model, event: ProcessesStarting) -> Outcome:
    """A restart or a crash of the old processes ends the proof, so that it does not keep them from ending."""
    model, effects = still_starting(model, event)
    if not model.is_old(event.id):
        return model, effects
    assert model.current is not None
    return disproven(model, Disproven(model.current.id, _nothing_to_compare(model)))


def _replace_old(model: Model) -> Outcome:
    rollout = replace(_rollout(model), step=RolloutStep.DRAINING)
    if model.old is None:  # it failed meanwhile
        return _finish(replace(model, rollout=rollout))
    id_ = model.old.id
    model = with_status(replace(model, rollout=rollout), id_, ProcessesStatus.STOPPING)
    return model, (Withdraw(id_), Stop(id_, model.old_sized))


def proven(model: Model, event: Proven) -> Outcome:
    """A change that came meanwhile is rolled out like any other."""
    assert model.sized is not None
    admitted = Admit(event.id, model.sized)
    model, effects = _replace_old(replace(model, spec=replace(model.spec, unproven=False)))
    return model, (admitted, *effects)


def disproven(model: Model, event: Disproven) -> Outcome:
    """The new processes stop, as if they were the old ones. If the old ones failed meanwhile, the next
    request loads the model. All that starts from now on is of the old build, also after a change that came
    meanwhile.
    """
    model = _with_old_build(model)
    if model.old is None or model.old.status is ProcessesStatus.STOPPING:
        model, ended = end_rollout(model, event.error)
        model, stops = stop_processes(model)
        return replace(model, state=ModelState.UNLOADING, for_id=""), (*ended, *stops)
    assert model.current is not None
    refused = replace(model.current, status=ProcessesStatus.STOPPING)
    rollout = replace(_rollout(model), step=RolloutStep.DRAINING, error=event.error)
    kept = replace(
        model, rollout=rollout, current=model.old, sized=model.old_sized, old=refused, old_sized=model.sized
    )
    return kept, (Stop(event.id, model.sized),)


def _with_old_build(model: Model) -> Model:
    """Its newest spec, with the build of the old processes."""
    return replace(model, spec=replace(model.spec, runtime=_rollout(model).build, unproven=False))


def new_failed_beside(model: Model, event: ProcessesFailed) -> Outcome:
    """The old processes keep serving. If they fail, they are not restarted: the new ones will serve."""
    if model.is_old(event.id):
        assert model.old is not None
        stopping = with_status(model, event.id, ProcessesStatus.STOPPING)
        return stopping, (Stop(event.id, model.old_sized),)
    dropped = Drop(event.id)
    if _is_unproven(model):
        model = _with_old_build(model)
    model = replace(model, current=model.old, sized=model.old_sized, old=None, old_sized=None)
    if model.current is None or model.current.status is ProcessesStatus.STOPPING:
        model, ended = end_rollout(replace(model, answer=event.answer), event.error)
        model, effects = fail(model, event.error)
        return model, (dropped, *ended, *effects)
    model, effects = _keep_old(model, event.error)
    return model, (dropped, *effects)


def _is_unproven(model: Model) -> bool:
    target = _rollout(model).target
    return target is not None and target.spec.unproven


def _keep_old(model: Model, error: LlamasupError | None) -> Outcome:
    """The old spec is kept after a failure of the new one, unless a newer one came meanwhile. That of an
    unproven build is given up.
    """
    target = _rollout(model).target
    is_newest = target is not None and target.is_of(model.spec)
    why = error if _is_unproven(model) else None
    model, settled = settle(model)
    model, effects = end_rollout(model, error) if is_newest else begin_rollout(model, why)
    return model, (*settled, *effects)


def _finish(model: Model) -> Outcome:
    """The new spec serves. A change that came meanwhile begins another rollout."""
    model, settled = settle(model)
    model, effects = begin_rollout(model)
    return model, (*settled, *effects)


def drained(model: Model, event: ProcessesReleased) -> Outcome:
    """The memory of the old processes is free."""
    is_old = model.is_old(event.id)
    model, dropped = release(model, event.id)
    if not is_old:
        return model, dropped
    if (error := model.error) is not None:
        model, ended = end_rollout(model)
        model, effects = fail(model, error)
    elif (refused := _rollout(model).error) is not None:
        ended = ()
        model, effects = _keep_old(model, refused)
    else:
        ended = ()
        model, effects = _finish(model)
    return model, (*dropped, *ended, *effects)


def failed_while_draining(model: Model, event: ProcessesFailed) -> Outcome:
    """The new processes failed after they had served: the model fails once the old ones have ended."""
    stopping = with_status(model, event.id, ProcessesStatus.STOPPING)
    return replace(stopping, error=event.error, answer=event.answer), (Stop(event.id, model.sized),)


def stopped_old(model: Model, event: ProcessesReleased) -> Outcome:
    rollout = _rollout(model)
    freed = replace(rollout, step=RolloutStep.FREED)
    return replace(model, current=None, sized=rollout.target, rollout=freed), (Drop(event.id),)


def start_new(model: Model, event: SwapGranted) -> Outcome:
    """Start the new processes. If others must be evicted first, or a newer spec came meanwhile, this is an
    ordinary load.
    """
    rollout = _rollout(model)
    assert rollout.target is not None
    if event.fits and rollout.target.is_of(model.spec):
        return _start(model, rollout.target, replace(rollout, step=RolloutStep.STARTING))
    model = replace(model, state=ModelState.ABSENT, rollout=None)
    if rollout.target.is_of(model.spec):
        return model, (Reload(),)
    model, effects = forget_spec(model)
    return model, (*effects, Reload())


def new_serving(model: Model, event: ProcessesServing) -> Outcome:
    model = with_status(model, event.id, ProcessesStatus.SERVING)
    return _finish(model) if event.complete else (model, ())


def new_failed_in_turn(model: Model, event: ProcessesFailed) -> Outcome:
    """Requests keep waiting while the old spec is started again."""
    rollout = _rollout(model)
    assert rollout.before is not None
    restoring = replace(rollout, step=RolloutStep.RESTORING, error=event.error)
    model, start = _start(model, rollout.before, restoring)
    return model, (Drop(event.id), *start)


def restored(model: Model, event: ProcessesServing) -> Outcome:
    model = with_status(model, event.id, ProcessesStatus.SERVING)
    return _keep_old(model, _rollout(model).error) if event.complete else (model, ())


def restore_failed(model: Model, event: ProcessesFailed) -> Outcome:
    error = _rollout(model).error
    status = ProcessesStatus.FAILED
    stops: tuple[Stop, ...] = ()
    if not event.settled:
        status, stops = ProcessesStatus.STOPPING, (Stop(event.id, model.sized),)
    model, ended = end_rollout(with_status(replace(model, answer=event.answer), event.id, status), error)
    model, effects = fail(model, event.error)
    return model, (*stops, *ended, *effects)
