from tests.core.proxy.conftest import loop_name, make_rig, no_cause, rig

__all__ = ["loop_name", "make_rig", "no_cause", "rig"]
