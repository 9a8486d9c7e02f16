"""File systems in which nobody keeps models."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llamasup.models.folder import pseudo_devices
from tests.paths import FIXTURES

MACHINES = FIXTURES / "hardware"


def test_kernel_file_systems_are_skipped_but_not_tmpfs() -> None:
    mountinfo = (
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        "23 27 0:22 / /sys rw,relatime shared:7 - sysfs sysfs rw\n"
        "24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,size=12334460k\n"
        "25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw\n"
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
    )
    assert pseudo_devices(mountinfo) == {(0, 21), (0, 22), (0, 6)}


def test_every_machine_has_some() -> None:
    for mountinfo in MACHINES.glob("*/proc/self/mountinfo"):
        assert pseudo_devices(mountinfo.read_text()), mountinfo


def test_what_is_no_line_of_a_mount_is_none() -> None:
    assert (
        pseudo_devices("22 27\n22 27 x:y / / rw - proc\n22 27 0: / / rw - proc\n0 0 0:1 / / rw - \n") == set()
    )
    assert pseudo_devices(f"22 27 {'9' * 5000}:1 / /proc rw - proc proc rw") == set()


@given(st.text())
def test_no_text_makes_it_raise(text: str) -> None:
    pseudo_devices(text)
