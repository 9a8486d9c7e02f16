from tests.proxy.conftest import loop_name, make_rig, rig

__all__ = ["loop_name", "make_rig", "rig"]
