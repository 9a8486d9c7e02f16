"""The facts that ``doctor`` collects itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamasup.core.system.native import native
from llamasup.features.doctor import collect

PROCESSOR = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\n"
RENOIR = "cpu_cores_count 0\nsimd_count 28\ngfx_target_version 90012\n"
MI50 = "cpu_cores_count 0\nsimd_count 240\ngfx_target_version 90006\n"


@pytest.mark.parametrize(
    ("files", "nodes", "vendors"),
    [
        ((), (), set()),
        (("nvidiactl", "nvidia-uvm"), (), set()),
        (("nvidiactl", "nvidia0"), (), {"NVIDIA"}),
        (("nvidia3",), (), {"NVIDIA"}),  # a container with one GPU of several
        (("kfd",), (PROCESSOR, RENOIR), set()),  # an ordinary laptop
        (("kfd",), (PROCESSOR, RENOIR, MI50), {"AMD"}),
        ((), (PROCESSOR, MI50), set()),  # a container without this GPU
    ],
)
def test_gpu_with_driver_is_found_in_kernel_files(
    files: tuple[str, ...], nodes: tuple[str, ...], vendors: set[str], tmp_path: Path
) -> None:
    (tmp_path / "dev").mkdir()
    for name in files:
        (tmp_path / "dev" / name).touch()
    for number, properties in enumerate(nodes):
        node = tmp_path / "sys/class/kfd/kfd/topology/nodes" / str(number)
        node.mkdir(parents=True)
        (node / "properties").write_text(properties)
    (tmp_path / "sys/class/kfd/kfd/topology/nodes/closed/properties").mkdir(parents=True)
    assert collect._gpu_drivers(tmp_path) == vendors


def test_unreadable_certificate_is_a_fact(tmp_path: Path) -> None:
    for name, content, problem in (("missing", None, "cannot be read"), ("empty", "", "no readable PEM")):
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        fact = collect._certificate_fact(path)
        assert problem in fact.problem
        assert not fact.is_current


def test_no_file_of_llama_cpp_is_looked_for_where_the_machine_has_no_folder_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "config.ini").write_text("ctx-size = 100\n")
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert [file.is_ignored for file in collect._config_files(environ)][:1] == [True]
    monkeypatch.setattr(native, "config_folder", None)  # as on Windows
    assert list(collect._config_files(environ)) == []
