"""The environment of a child (X6)."""

from __future__ import annotations

import pytest

from llamasup.core.system.process.child import RuntimeKind, child_environment


def given(environ: dict[str, str], kind: RuntimeKind = "binary", platform: str = "linux") -> dict[str, str]:
    return child_environment(environ, kind=kind, platform=platform, config_home="/e", library_path="/l")


OURS = {"XDG_CONFIG_HOME": "/e", "GGML_NO_BACKTRACE": "1", "LD_LIBRARY_PATH": "/l"}


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "LLAMA_ARG_CTX_SIZE", "LLAMA_API_KEY", "AWS_SECRET_ACCESS_KEY", "LD_PRELOAD"),
        *("NVIDIA_API_KEY", "GGML_TOKEN", "CUDA_SECRET", "OMP_PASSWORD", "VK_CREDENTIALS", "PYTHONPATH"),
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_SERVICE_NAME"),
    ],
)
def test_unlisted_variables_and_secrets_are_not_passed(name: str) -> None:
    assert given({name: "x"}) == OURS


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "LC_ALL", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "GGML_X"),
        *("ROCM_PATH", "ROCBLAS_TENSILE_LIBPATH", "HIPBLASLT_TENSILE_LIBPATH", "MUSA_VISIBLE_DEVICES"),
        *("ASCEND_HOME", "MESA_VK_DEVICE_SELECT", "RADV_PERFTEST", "DRI_PRIME", "OPENBLAS_NUM_THREADS"),
        *("MKL_NUM_THREADS", "XDG_DATA_DIRS", "XDG_DATA_HOME", "DYLD_FALLBACK_LIBRARY_PATH"),
    ],
)
def test_needed_variables_are_passed(name: str) -> None:
    assert given({name: "x"}) == {**OURS, name: "x"}


def test_a_servers_own_libraries_come_first() -> None:
    assert given({"LD_LIBRARY_PATH": "/u"})["LD_LIBRARY_PATH"] == "/l:/u"
    windows = given({"Path": "C:\\u"}, platform="win32")
    assert windows["PATH"] == "/l;C:\\u"
    assert "Path" not in windows
    assert given({}, platform="darwin")["DYLD_LIBRARY_PATH"] == "/l"


def test_the_embedded_runtime_finds_its_python() -> None:
    assert given({"PYTHONPATH": "x"}, "embedded") == {**OURS, "PYTHONPATH": "x"}


def test_where_there_is_no_library_path_none_is_set() -> None:
    assert child_environment({}, kind="binary", platform="linux", config_home="/e", library_path=None) == {
        "XDG_CONFIG_HOME": "/e",
        "GGML_NO_BACKTRACE": "1",
    }
