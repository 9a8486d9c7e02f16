"""Measure llamasup on a GPU: plans, memory, failures, ends. Writes the results as JSON and as docs/gpu.md.

    scripts/gpu/run [--only CHECK …] [--json FILE] [--write]
    scripts/gpu/run --from FILE --write

Without a GPU the checks run too, except that they then say nothing about GPU memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from scripts.gpu.checks import CHECKS, Bench
from scripts.gpu.models import NAMES, Models
from scripts.gpu.report import MARKS, page, report
from scripts.pages import DOCS, keep_current

_GB = 1_000_000_000


def main() -> None:
    options = _options()
    results = json.loads(options.earlier.read_text()) if options.earlier else _measured(options)
    print(report(results))
    if options.write:
        keep_current(DOCS / "gpu.md", MARKS, page(results), False, "scripts/gpu/run --write")
    failed = [name for name, result in results.items() if "problem" in result]
    sys.exit(f"These checks failed: {', '.join(failed)}" if failed else 0)


def _measured(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=options.folder) as folder:
        sizes = zip(NAMES, (int(size * _GB) for size in options.sizes_gb), strict=True)
        models = Models(Path(folder), dict(sizes))
        began_s = time.monotonic()
        for name in options.only or CHECKS:
            if time.monotonic() - began_s > options.limit_s:
                results[name] = {"problem": f"left out: {options.limit_s:.0f} s had passed"}
                continue
            results[name] = _checked(name, Path(folder), options, models)
            if options.json:  # after each check, in case the next one never ends
                options.json.write_text(json.dumps(results, indent=1, default=str))
    return results


def _checked(name: str, folder: Path, options: argparse.Namespace, models: Models) -> dict[str, Any]:
    """Run one check with a load history of its own, because earlier failures change a plan."""
    print(f"{name} …", file=sys.stderr, flush=True)
    own = folder / name
    own.mkdir()
    os.environ["XDG_STATE_HOME"] = str(own / "state")
    began_s = time.monotonic()
    try:
        result = CHECKS[name](Bench(options.runtime, own, models, options.rounds))
    except Exception as error:
        traceback.print_exc()
        result = {"problem": f"{type(error).__name__}: {error}"}
    print(f"{name}: {time.monotonic() - began_s:.1f} s", file=sys.stderr, flush=True)
    return result | {"took_s": time.monotonic() - began_s}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu/run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runtime", metavar="PATH", help="the llama-server to measure with")
    parser.add_argument("--only", nargs="*", choices=CHECKS, metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument(
        "--sizes-gb", nargs=3, type=float, default=(1, 8, 30), metavar="GB", help="sizes of the three models"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of a comparison")
    parser.add_argument("--limit-s", type=float, default=900, help="start no check after this time")
    parser.add_argument(
        "--folder", type=Path, metavar="PATH", help="for the models; default: the temporary folder"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to this file")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="earlier", help="take the results of this file"
    )
    parser.add_argument("--write", action="store_true", help="write the tables into docs/gpu.md")
    options = parser.parse_args()
    if not (options.runtime or options.earlier):
        parser.error("--runtime is missing")
    return options


if __name__ == "__main__":
    main()
