"""Write the table of docs/dependencies.md, in an environment with all extras but ``fleet``.

Size, import time and licence are those of the installed version. Its date of release is from a lock of uv.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "dependencies.md"
MARKS = ("<!-- dependencies: python packaging/dependencies.py -->", "<!-- end of dependencies -->")
TIMES = 5

# The module to import, and what it is for.
WHY = {
    "httpcore": ("httpcore", "connections to llama-server, under httpx"),
    "httptools": ("httptools", "the parser of HTTP/1.1 in the proxy, in C"),
    "httpx": ("httpx", "requests to llama-server, other llamasups and the hub"),
    "msgspec": ("msgspec", "settings, JSON and YAML with types; each start reads them"),
    "platformdirs": ("platformdirs", "the folders of each system"),
    "prometheus-client": ("prometheus_client", "`/metrics`"),
    "prompt-toolkit": ("prompt_toolkit", "the line editor of `chat`"),
    "psutil": ("psutil", "processes, memory and CPUs of each system"),
    "pyyaml": ("yaml", "the config"),
    "rich": ("rich", "tables and progress in the terminal"),
    "starlette": ("starlette.applications", "routes of the control API and the console"),
    "tenacity": ("tenacity", "retries of requests to llama-server"),
    "typer": ("typer", "commands and options"),
    "uvicorn": ("uvicorn", "the server of the control API"),
    "uvloop": ("uvloop", "a faster event loop; not on Windows"),
    "watchfiles": ("watchfiles", "changes of the config and of model folders"),
    "jsonschema": ("jsonschema", "extra `batch`: answers that must match a schema"),
    "xllamacpp": ("xllamacpp", "extra `embedded`: llama.cpp, for the CPU"),
    "nvidia-ml-py": ("pynvml", "extra `gpu`: the memory of NVIDIA's GPUs"),
    "opentelemetry-exporter-otlp-proto-http": (
        "opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "extra `otel`: traces",
    ),
}


def lower_bounds() -> dict[str, str]:
    """Return the oldest allowed version of each package of the table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + [
        line for name in ("batch", "embedded", "gpu", "otel") for line in extras[name]
    ]
    return {re.match(r"[\w.-]+", line)[0].lower(): re.search(r">=([\d.]+)", line)[1] for line in lines}


def release_dates() -> dict[str, str]:
    """Return the day on which each locked version was released, as a lock of uv names it."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "pyproject.toml").write_text(
            "[project]\nname = 'x'\nversion = '0'\nrequires-python = '>=3.11'\ndependencies = ["
            + ",".join(f"'{name}=={metadata.version(name)}'" for name in WHY)
            + "]\n",
            "utf-8",
        )
        uv = Path(sys.executable).with_name("uv")
        subprocess.run([uv, "lock", "--quiet"], cwd=folder, check=True)
        packages = tomllib.loads(Path(folder, "uv.lock").read_text("utf-8"))["package"]
    dates = {}
    for package in packages:
        files = [package.get("sdist", {}), *package.get("wheels", [])]
        times = [str(file["upload-time"])[:10] for file in files if "upload-time" in file]
        dates[package["name"]] = max(times, default="")
    return dates


def import_ms(module: str) -> float:
    """Return the shortest time of an import, each in a new Python."""
    code = "import time; t = time.perf_counter(); import {}; print((time.perf_counter() - t) * 1000)"
    command = [sys.executable, "-c", code.format(module)]
    return min(float(subprocess.check_output(command)) for _ in range(TIMES))


def licence(name: str) -> str:
    found = metadata.metadata(name)
    classified = [
        line.rpartition(":: ")[2]
        for line in found.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    text = (
        found.get("License-Expression")
        or next(iter(classified), "")
        or (found.get("License") or "").split("\n")[0]
    )
    return text.removesuffix(" License").replace("OSI Approved", "")


def table() -> str:
    bounds, dates = lower_bounds(), release_dates()
    missing = set(bounds) ^ set(WHY)
    if missing:
        raise SystemExit(f"packaging/dependencies.py: add or remove in WHY: {', '.join(sorted(missing))}")
    lines = [
        "| Package | For | Oldest | Measured | Released | MB | Import, ms | Licence |",
        "|---|---|---|---|---|---:|---:|---|",
    ]
    for name, (module, why) in WHY.items():
        files = metadata.files(name) or []
        size = sum(
            Path(str(file.locate())).stat().st_size for file in files if Path(str(file.locate())).is_file()
        )
        cells = (
            name, why, bounds[name], metadata.version(name), dates.get(name, ""), f"{size / 1e6:.1f}",
            f"{import_ms(module):.0f}", licence(name),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{table()}\n\n{MARKS[1]}{after}", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
