"""Takes the reports about processes, and has the steps of a swap: new processes replace old ones (pure).

If both fit into memory and need no RPC workers, the new processes start while the old ones serve, which
then finish their requests. Otherwise the old ones stop first, and are started again if the new ones fail.

The processes of an unproven build start while the old ones serve, or not at all, and get no requests until
the build has proven itself. If it is refused, they stop, and the old ones have served all the time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from llamasup.core.planning.memory.shares import remaining
from llamasup.core.pool.eviction_policy import Grounds
from llamasup.core.pool.model_states import (
    HOLDING,
    Estimate,
    Model,
    ModelState,
    Processes,
    ProcessesStatus,
    Rollout,
    RolloutEnd,
    RolloutStep,
    free_for,
    is_outdated,
    is_proof_under_way,
    needs_of,
)
from llamasup.core.pool.model_steps import (
    begin_rollout,
    end_rollout,
    fail,
    forget_failure,
    forget_spec,
    stop_all,
    stopping,
)
from llamasup.errors import BuildUnproven, DoesNotFit, LlamasupError


def observe(model: Model, seen: Processes) -> Model:
    """Take a report about processes. Those that stop have only their end to report."""
    known = next((each for each in model.processes if each.id == seen.id), None)
    has_stopped = seen.status is ProcessesStatus.STOPPED
    if known is None or known == seen or (known.status is ProcessesStatus.STOPPING) is not has_stopped:
        return model
    if has_stopped or known.status in HOLDING:
        return follow(_with(model, seen))
    if seen.status is ProcessesStatus.FAILED:
        return model
    # A process started that has no memory of its own, such as by a restart that came too late.
    stopped = _with(model, replace(seen, status=ProcessesStatus.STOPPING))
    return replace(stopped, error=None, answer=None) if model.state is ModelState.FAILED else stopped


def _with(model: Model, seen: Processes) -> Model:
    if model.old is not None and model.old.id == seen.id:
        return replace(model, old=seen)
    return replace(model, current=seen)


def follow(model: Model) -> Model:
    """Do all that the states of the processes lead to. Called again, it changes nothing."""
    if model.old is not None and model.old.status is ProcessesStatus.STOPPED:  # they will not start again
        model = replace(model, old=None, old_sized=None)
    current, rollout = model.current, model.rollout
    if current is None or model.removal is not None:
        return model
    if rollout is not None and model.state is ModelState.ROLLING_OUT:
        return _follow_swap(model, rollout, current)
    if model.error is not None:
        return model
    if current.status is ProcessesStatus.FAILED:
        return _failed(model, current)
    is_free = current.status is ProcessesStatus.STOPPED and not model.holding
    return forget_spec(model) if is_free and is_outdated(model) else model


def _failed(model: Model, current: Processes) -> Model:
    """A replica that would try again by itself is stopped: its memory may not be its own then. A model that
    shares no memory tries again.
    """
    if model.spec.stay.by_command and not current.settled:
        return replace(model, current=replace(current, status=ProcessesStatus.STARTING), for_id="")
    is_replaced = model.rollout is not None
    model = _stop_unsettled(end_rollout(model), current)
    if is_replaced:  # the new spec may work: it is loaded if the model is still wanted
        return forget_failure(model)
    return fail(replace(model, answer=current.answer, for_id=""), _error_of(current))


def _stop_unsettled(model: Model, failed: Processes) -> Model:
    if failed.settled:
        return model
    return replace(model, current=replace(failed, status=ProcessesStatus.STOPPING))


def _error_of(failed: Processes) -> LlamasupError:
    assert failed.error is not None  # the driver reports a failure with its error
    return failed.error


# --- swaps


def turn_of(model: Model, others: Sequence[Model], budget: Mapping[str, int]) -> bool | None:
    """Return whether the new processes fit into the free memory, or None if the model may not ``swap`` now.

    One model swaps at a time: then two generations fit in the memory more often. The proof of a build takes
    minutes, so no other model waits for it.
    """
    rollout = model.rollout
    if rollout is None or rollout.target is None:
        return None
    free = free_for(model, others, budget)
    if rollout.step is RolloutStep.WAITING and not any(
        other.state is ModelState.ROLLING_OUT and not is_proof_under_way(other) for other in others
    ):
        free = remaining(free, [needs_of(model)])
    elif rollout.step is not RolloutStep.FREED:
        return None
    return all(free.get(device, 0) >= size for device, size in rollout.target.needs.items())


def swap(model: Model, *, fits: bool) -> Model:
    """It is this model's turn. ``fits``: the new processes fit into the free memory, together
    with the old ones if those serve.
    """
    rollout, current = model.rollout, model.current
    if rollout is None or rollout.target is None:
        return model  # the rollout has ended, or its spec is sized again
    if rollout.step is RolloutStep.FREED:
        return _start_new(model, rollout, rollout.target, fits=fits)
    if rollout.step is not RolloutStep.WAITING or current is None:
        return model
    is_beside = fits and not _has_workers(model, rollout.target)
    is_serving = current.status is ProcessesStatus.SERVING
    if rollout.target.spec.unproven:
        if not is_beside:
            return end_rollout(model, _no_room_to_prove(model))
        if not is_serving:
            return model  # until there is something to compare with
    model = replace(model, for_id="")
    if is_beside and is_serving:
        build = "" if model.sized is None else model.sized.spec.runtime
        model = replace(model, old=current, old_sized=model.sized)
        return _start(model, rollout.target, replace(rollout, step=RolloutStep.BESIDE, build=build))
    in_turn = replace(rollout, step=RolloutStep.STOPPING, before=model.sized)
    return stop_all(replace(model, rollout=in_turn, reason="changed"))


def _start_new(model: Model, rollout: Rollout, target: Estimate, *, fits: bool) -> Model:
    """Start the new processes. If others must be evicted first, or a newer spec came meanwhile, this is an
    ordinary load.
    """
    is_newest = target.is_of(model.spec)
    if fits and is_newest:
        return _start(model, target, replace(rollout, step=RolloutStep.STARTING))
    model = replace(model, rollout=None, rollout_end=RolloutEnd(reload=True))
    return model if is_newest else forget_spec(model)


def _start(model: Model, sized: Estimate, rollout: Rollout) -> Model:
    id_ = model.made + 1
    return replace(model, made=id_, current=Processes(id_), sized=sized, rollout=rollout, reason="")


def _has_workers(model: Model, target: Estimate) -> bool:
    """A worker serves one llama-server: the new processes would start without those of the old ones."""
    old = model.sized
    return bool(target.spec.settings.rpc or (old is not None and old.spec.settings.rpc))


def _follow_swap(model: Model, rollout: Rollout, current: Processes) -> Model:
    is_complete = current.status is ProcessesStatus.SERVING and current.complete
    has_failed = current.status is ProcessesStatus.FAILED
    match rollout.step:
        case RolloutStep.BESIDE | RolloutStep.PROVING:
            return _follow_beside(model, rollout, current)
        case RolloutStep.DRAINING if has_failed:
            # The new processes had served: the model fails once the old ones have ended.
            stopped = replace(current, status=ProcessesStatus.STOPPING)
            return replace(model, current=stopped, error=current.error, answer=current.answer)
        case RolloutStep.DRAINING if model.old is None and model.error is not None:
            return end_rollout(model)
        case RolloutStep.DRAINING if model.old is None and rollout.error is not None:
            return _keep_old(model, rollout, rollout.error)
        case RolloutStep.DRAINING if model.old is None:
            return begin_rollout(model)
        case RolloutStep.STOPPING if current.status is ProcessesStatus.STOPPED:
            return replace(
                model, current=None, sized=rollout.target, rollout=replace(rollout, step=RolloutStep.FREED)
            )
        case RolloutStep.STARTING if is_complete:
            return begin_rollout(model)  # a change that came meanwhile begins another one
        case RolloutStep.STARTING if has_failed and rollout.before is not None:
            # Requests keep waiting while the old spec is started again.
            restoring = replace(rollout, step=RolloutStep.RESTORING, error=current.error)
            return _start(model, rollout.before, restoring)
        case RolloutStep.RESTORING if is_complete:
            return _keep_old(model, rollout, rollout.error)
        case RolloutStep.RESTORING if has_failed:
            model = end_rollout(_stop_unsettled(model, current), rollout.error)
            return fail(replace(model, answer=current.answer), _error_of(current))
        case _:
            return model


def _follow_beside(model: Model, rollout: Rollout, current: Processes) -> Model:
    """The old processes keep serving. If they fail, they are not restarted: the new ones will serve. The new
    ones get the requests once all replicas have started, or failed.
    """
    old = model.old
    if old is not None and old.status is ProcessesStatus.FAILED:
        old = replace(old, status=ProcessesStatus.STOPPING)
        model = replace(model, old=old)
    if current.status is ProcessesStatus.FAILED:
        return _new_failed(model, rollout, current)
    if rollout.step is RolloutStep.PROVING:
        # A restart or a crash of the old processes ends the proof, so that it does not keep them from ending.
        is_restarting = old is not None and old.status is ProcessesStatus.STARTING
        return _refuse_build(model, rollout, _nothing_to_compare(model)) if is_restarting else model
    if current.status is not ProcessesStatus.SERVING or not current.complete:
        return model
    if not rollout.is_unproven:
        return _replace_old(model, rollout)
    if old is None or old.status is not ProcessesStatus.SERVING:
        return _refuse_build(model, rollout, _nothing_to_compare(model))
    return replace(model, rollout=replace(rollout, step=RolloutStep.PROVING))


def _replace_old(model: Model, rollout: Rollout) -> Model:
    draining = replace(rollout, step=RolloutStep.DRAINING)
    return follow(replace(model, rollout=draining, old=stopping(model.old)))


def _new_failed(model: Model, rollout: Rollout, failed: Processes) -> Model:
    if rollout.is_unproven:
        model = _with_old_build(model, rollout)
    model = replace(model, current=model.old, sized=model.old_sized, old=None, old_sized=None)
    if model.current is None or model.current.status is ProcessesStatus.STOPPING:
        model = end_rollout(replace(model, answer=failed.answer), failed.error)
        return fail(model, _error_of(failed))
    return _keep_old(model, rollout, failed.error)


def _keep_old(model: Model, rollout: Rollout, error: LlamasupError | None) -> Model:
    """The old spec is kept after a failure of the new one, unless a newer one came meanwhile. That of an
    unproven build is given up.
    """
    if rollout.target is not None and rollout.target.is_of(model.spec):
        return end_rollout(model, error)
    return begin_rollout(model, error if rollout.is_unproven else None)


# --- proofs of a build


def prove(model: Model, id_: int) -> Model:
    """The build of these processes may serve. A change that came meanwhile is rolled out like any other."""
    rollout = model.rollout
    if rollout is None or model.place is not RolloutStep.PROVING or not _is_current(model, id_):
        return model
    return _replace_old(replace(model, spec=replace(model.spec, unproven=False)), rollout)


def disprove(model: Model, id_: int, error: LlamasupError) -> Model:
    """The build of these processes is refused, or could not be judged."""
    rollout = model.rollout
    if rollout is None or not is_proof_under_way(model) or not _is_current(model, id_):
        return model
    return _refuse_build(model, rollout, error)


def memory_needed(model: Model, grounds: Mapping[str, Grounds]) -> BuildUnproven | None:
    """Return the reason to end the proof, if a model that is wanted needs the memory more. ``grounds``: of
    the current decision of the policy.
    """
    if not is_proof_under_way(model) or model.sized is None:
        return None
    for id_, why in grounds.items():
        lacks = any(kind == "memory" and name in model.sized.needs for kind, name in why.lack)
        if lacks and not why.idle_models_suffice:
            purpose = f"for {id_!r}" if id_ else "to stay within the budget"
            return BuildUnproven(
                f"The memory of the proof with {model.spec.id!r} was needed {purpose}.",
                remedy="Try again when there are fewer requests.",
            )
    return None


def _is_current(model: Model, id_: int) -> bool:
    return model.current is not None and model.current.id == id_


def _refuse_build(model: Model, rollout: Rollout, error: LlamasupError) -> Model:
    """The new processes stop, as if they were the old ones. If the old ones failed meanwhile, the next
    request loads the model. All that starts from now on is of the old build, also after a change that came
    meanwhile.
    """
    model = _with_old_build(model, rollout)
    if model.old is None or model.old.status is ProcessesStatus.STOPPING:
        return stop_all(end_rollout(model, error))
    return replace(
        model,
        rollout=replace(rollout, step=RolloutStep.DRAINING, error=error),
        current=model.old,
        sized=model.old_sized,
        old=stopping(model.current),
        old_sized=model.sized,
    )


def _with_old_build(model: Model, rollout: Rollout) -> Model:
    """Its newest spec, with the build of the old processes."""
    return replace(model, spec=replace(model.spec, runtime=rollout.build, unproven=False))


def _nothing_to_compare(model: Model) -> BuildUnproven:
    return BuildUnproven(
        f"The new build cannot prove itself with {model.spec.id!r}: the running processes have exited.",
        remedy="Try again later.",
    )


def _no_room_to_prove(model: Model) -> DoesNotFit:
    return DoesNotFit(
        f"The new build cannot prove itself with {model.spec.id!r}: the model does not fit into the memory "
        "that the running build leaves free.",
        remedy="Unload other models, and try again.",
    )
