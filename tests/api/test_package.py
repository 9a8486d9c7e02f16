"""The names that ``import llamasup`` provides, and the modules that it loads."""

from __future__ import annotations

import inspect
import subprocess
import sys
from typing import Any, get_type_hints

import pytest

import llamasup
from llamasup import errors
from llamasup.core.settings.model import ModelEntry

NAMES = {
    "AccessDenied",
    "AsyncEvents",
    "AsyncServer",
    "BrokenRuntime",
    "Config",
    "ConfigInvalid",
    "Conflict",
    "DiskFull",
    "DoesNotFit",
    "DownloadFailed",
    "DownloadRefused",
    "Events",
    "FolderUnusable",
    "GaveUp",
    "LlamasupError",
    "ModelArguments",
    "ModelInvalid",
    "ModelMissing",
    "ModelUnknown",
    "NotRunning",
    "PortInUse",
    "PortNotAllowed",
    "RequestUnknown",
    "RuntimeMissing",
    "Server",
    "ServerFailed",
    "Serving",
    "Stopping",
    "UnsafeBind",
    "UsageInvalid",
    "__version__",
    "serve",
}


def test_public_names_are_complete_and_importable() -> None:
    assert set(llamasup.__all__) == NAMES
    assert set(dir(llamasup)) >= NAMES
    for name in NAMES:
        assert getattr(llamasup, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'server'"):
        _ = llamasup.server


def test_every_error_is_a_llamasup_error() -> None:
    raised = [getattr(llamasup, name) for name in NAMES if hasattr(errors, name)]
    assert len(raised) == 23
    assert all(issubclass(item, llamasup.LlamasupError) for item in raised)


def test_import_of_llamasup_loads_no_other_modules() -> None:
    code = "import sys; before = set(sys.modules); import llamasup; print(*sorted(set(sys.modules) - before))"
    imported = _python(code).split()
    assert "llamasup" in imported
    assert [name for name in imported if name.startswith("llamasup.")] == []
    heavy = {"asyncio", "httpx", "msgspec", "yaml", "uvloop", "starlette", "psutil", "logging", "ssl"}
    assert heavy & {name.partition(".")[0] for name in imported} == set()


def test_catching_an_error_does_not_import_the_server() -> None:
    code = "import sys, llamasup; llamasup.DoesNotFit; print(*sys.modules)"
    assert {"asyncio", "httpx", "yaml", "llamasup.api"} & set(_python(code).split()) == set()


def test_serving_imports_neither_the_control_application_nor_rich() -> None:
    """They are loaded on first use, which a serving program may never need."""
    code = "import sys, llamasup; llamasup.serve; print(*sys.modules)"
    loaded = set(_python(code).split())
    assert {"starlette", "uvicorn", "rich", "typer", "prometheus_client"} & loaded == set()


def test_both_server_classes_have_the_same_methods_and_arguments() -> None:
    asynchronous, synchronous = _shape(llamasup.AsyncServer), _shape(llamasup.Server)
    assert asynchronous.keys() == synchronous.keys()
    for name, signature in asynchronous.items():
        assert signature.parameters == synchronous[name].parameters, name


def test_model_arguments_equal_the_model_keys_of_a_config() -> None:
    places = {"path", "repo", "url", "where"}
    assert get_type_hints(llamasup.ModelArguments).keys() == set(ModelEntry.__struct_fields__) - places


def _shape(of: type[Any]) -> dict[str, inspect.Signature]:
    functions = inspect.getmembers(of, inspect.isfunction)
    return {name: inspect.signature(item) for name, item in functions if not name.startswith("_")}


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout
