"""What ``doctor`` finds out by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.runtime import doctor


@pytest.mark.parametrize(
    ("files", "vendors"),
    [
        ((), set()),
        (("nvidiactl", "nvidia-uvm"), set()),
        (("nvidiactl", "nvidia0"), {"NVIDIA"}),
        (("nvidia3",), {"NVIDIA"}),  # a container that was given one GPU of several
        (("kfd", "null"), {"AMD"}),
    ],
)
def test_the_driver_of_a_gpu_is_known_by_its_device_files(
    files: tuple[str, ...], vendors: set[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert doctor._gpu_drivers(tmp_path) == vendors
