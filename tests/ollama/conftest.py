from __future__ import annotations

from tests.proxy.conftest import clock as clock
from tests.proxy.conftest import loop_name as loop_name
from tests.proxy.conftest import make_rig as make_rig
from tests.proxy.conftest import no_cause as no_cause
