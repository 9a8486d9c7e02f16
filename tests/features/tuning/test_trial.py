"""What a trial occupies besides CPUs and memory. tests/extended/real/test_tune.py has real trials."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from msgspec.structs import replace

from llamasup.core.llama_server.rpc.in_use import USED
from llamasup.features.tuning.trial import spawn_trial
from tests.core.planning.plans import planned

WORKER = "10.0.0.2:50052"


def test_trial_uses_its_workers_until_its_end(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    plan = replace(planned(), argv=(sleep, "1000"), workers=(WORKER,))

    async def test() -> None:
        trial = spawn_trial(plan, tmp_path)
        try:
            assert USED.user_of(WORKER) == "a trial"
        finally:
            await trial.end()
        assert USED.user_of(WORKER) is None
        await trial.end()  # again, as after an error
        assert USED.user_of(WORKER) is None

    asyncio.run(test())
