from __future__ import annotations

from tests.core.proxy.conftest import clock as clock
from tests.core.proxy.conftest import loop_name as loop_name
from tests.core.proxy.conftest import make_rig as make_rig
from tests.core.proxy.conftest import no_cause as no_cause
from tests.core.proxy.conftest import rig as rig
