from __future__ import annotations

from llamasup.core.http.address import UnixAddress
from llamasup.core.llama_server.diagnosis import Diagnosis
from llamasup.core.llama_server.log_lines import Drafted
from llamasup.core.planning.measured.load_times import LoadFacts
from llamasup.core.supervision.plan_protocol import FixedPlan, FixedPlanner


def test_fixed_plan_has_no_smaller_one_and_its_loads_teach_nothing() -> None:
    planner, made = FixedPlanner(), FixedPlan(("server",), {}, UnixAddress("/run/1.sock"))
    oom = Diagnosis("out_of_memory_host", "", "", (), True, 71)
    planner.served(made, (), resident_bytes=1, generated=True)
    planner.drafted(made, Drafted(2, 1))
    assert planner.step_down(made, oom) is None
    assert planner.name_lost(made, oom) == oom
    assert planner.load_facts(made) == LoadFacts()
