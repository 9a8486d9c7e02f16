"""Writes the results of the checks as Markdown tables: all of them, or those of docs/gpu.md."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from scripts.bench import plan as bench_plan
from scripts.pages import marks_of

__all__ = ["MARKS", "page", "report"]

MARKS = marks_of("gpu", "scripts/gpu/run --write")
Result = Mapping[str, Any]

# What the page has of the results: what readers need for a decision.
_ON_PAGE = frozenset({"machine", "memory", "speed", "split", "replicas", "ends"})
_FIGURES_ON_PAGE = frozenset({"prompt_tps", "generation_tps", "served4_tps", "served8_tps"})


def page(results: Mapping[str, Result]) -> str:
    """The part of the report that docs/gpu.md has."""
    shown = {name: result for name, result in results.items() if name in _ON_PAGE}
    return report(shown, figures=_FIGURES_ON_PAGE)


def report(results: Mapping[str, Result], *, figures: Collection[str] | None = None) -> str:
    """Markdown; a check that failed or was left out is named with its problem.

    ``figures`` are the rows of the tables about speed; by default all.
    """
    parts = []
    for name, result in results.items():
        title, describe = _SECTIONS[name]
        if name == "speed":
            describe = partial(_speed, figures=figures)
        problem = result.get("problem")
        parts.append(f"### {title}\n\n{f'Not measured: {problem}' if problem else describe(result)}")
    return "\n" + "\n\n".join(parts) + "\n"


def _machine(result: Result) -> str:
    gpu, version = result["gpu"] or "none", result["version"].splitlines()[0]
    return f"- GPU: {gpu}\n- CPU: {result['cpu']}\n- llama-server: {version}, CUDA"


def _memory(result: Result) -> str:
    def row(one: Result) -> Iterable[str]:
        predicted = one["predicted"]["devices"]["needed_bytes"]
        yield f"{one['model']}, {_gb(one['file_bytes'])}"
        yield f"`{one['options']}`" if one["options"] else ""
        yield _gb(predicted)
        yield _gb(one["measured_bytes"])
        yield _ratio(predicted, one["measured_bytes"])

    return _table(
        ("model", "options", "predicted", "measured (NVML)", "predicted ÷ measured"), result["rows"], row
    )


def _speed(result: Result, *, figures: Collection[str] | None = None) -> str:
    models = {name: one for name, one in result.items() if isinstance(one, dict)}
    return "The first column is absolute, the others are ratios to it.\n\n" + "\n\n".join(
        f"The {name} model:\n\n{bench_plan.table(one['rounds'], figures)}" for name, one in models.items()
    )


def _warm_up(result: Result) -> str:
    rows = []
    for options, label in (("", "with"), ("--no-warmup", "without")):
        chosen = [row for row in result["rows"] if row["options"] == options]
        times = {key: _median(chosen, key) for key in ("ready_s", "first_s", "second_s", "third_s")}
        rows.append((label, *(f"{time_s * 1e3:,.0f} ms" for time_s in times.values())))
    header = ("warm-up", "start to ready", "1st request to first token", "2nd", "3rd")
    return _table(header, rows, lambda row: row)


def _split(result: Result) -> str:
    rows = [
        (
            name,
            one.get("problem") or f"{one['prompt_per_second']:,.0f}",
            "" if "problem" in one else f"{one['predicted_per_second']:.1f}",
        )
        for name, one in result["speed"].items()
    ]
    header = ("command line", "prompt, tokens/s", "generation, tokens/s")
    free, used = result["free_bytes"], result["used_bytes"]
    predicted = result["predicted"]["devices"]["needed_bytes"]
    about = f"{_gb(free)} are free. The plan predicts {_gb(predicted)}; the load takes {_gb(used)}."
    return f"{about}\n\n{_table(header, rows, lambda row: row)}"


def _events(result: Result) -> str:
    lines = []
    for at_s, event in result["events"]:
        if event["event"] == "progress":
            continue
        words = [event["event"], event.get("state"), event.get("cause"), event.get("message")]
        changes = (event.get("adjustment") or {}).get("changes", ())
        words += [f"{each['setting']} {each['before']} → {each['after']}" for each in changes]
        lines.append(f"{at_s:7.2f} s  {' '.join(str(word) for word in words if word)}")
    return "```\n" + "\n".join(lines) + "\n```"


def _out_of_memory(result: Result) -> str:
    slots = ", ".join(argv[argv.index("--parallel") + 1] for argv in result["argv"])
    served = result["answer"] is not None and not result["answer"]["problem"]
    end = f"Then it serves, with {slots} slot." if served else "It did not serve."
    return f"{_events(result)}\n\n{end}"


def _memory_taken(result: Result) -> str:
    answers = result["answers"]
    whole = sum(not answer["problem"] for answer in answers)
    problems = sorted({answer["problem"] for answer in answers if answer["problem"]})
    lines = [
        f"{_gb(result['left_bytes'])} are left on the GPU.",
        f"{whole} of {len(answers)} requests got a whole answer.",
        *(f"- {problem}" for problem in problems),
        f"Once the memory is free again: {result['after']['problem'] or 'a whole answer'}.",
    ]
    return "\n".join(lines) + f"\n\n{_events(result)}"


def _swap(result: Result) -> str:
    def row(one: Result) -> Iterable[str]:
        return one["model"], f"{one['took_s']:.2f} s", str(one["servers"]), one["problem"] or "whole answer"

    return _table(("request for", "took", "servers after it", "answer"), result["rows"], row)


def _replicas(result: Result) -> str:
    one_process = result["rows"][0]["tokens_per_s"]

    def row(one: Result) -> Iterable[str]:
        yield str(one["replicas"])
        yield f"{one['tokens_per_s']:,.0f}"
        yield f"{one['tokens_per_s'] / one_process:.2f}"
        yield _gb(one["used_bytes"])

    return _table(("processes", "8 clients, tokens/s", "ratio", "GPU memory"), result["rows"], row)


def _ends(result: Result) -> str:
    def row(one: Result) -> Iterable[str]:
        yield one["what"]
        yield _gb(one["held_bytes"])
        yield _seconds(one.get("process_gone_s"))
        yield _seconds(one.get("memory_freed_s"))
        yield f"{one['left_bytes'] / 1e6:,.0f} MB" if "left_bytes" in one else ""
        yield _seconds(one.get("serves_again_s"))

    header = (
        "in the middle of an answer",
        "GPU memory",
        "server gone",
        "memory free",
        "left",
        "serves again",
    )
    return _table(header, result["rows"], row)


def _loading(result: Result) -> str:
    def row(one: Result) -> Iterable[str]:
        yield one["model"]
        yield "cold" if one["cold"] else "warm"
        yield f"{one['took_s']:.2f} s"
        yield _seconds(one["eta_s"])
        yield f"{one['left_s']:.2f} s"

    header = ("model", "file cache", "load took", "announced at half time", "real")
    return _table(header, result["rows"], row)


def _usage(result: Result) -> str:
    usage = result["usage"]
    rows = usage["rows"] if isinstance(usage, dict) else []
    shown_j = sum(row["energy_j"] or 0 for row in rows)
    shown_tokens = sum(row["tokens_completion"] for row in rows)
    return (
        f"`llamasup usage` shows {shown_tokens:,} completion tokens and {shown_j:,.0f} J. "
        f"The clients got {result['tokens']:,} tokens after the first request. "
        f"Meanwhile the GPU's counter grew by {result['gpu_j']:,.0f} J in {result['watched_s']:.1f} s."
    )


def _table(header: Sequence[str], rows: Iterable[Any], cells: Callable[[Any], Iterable[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|---|{'---:|' * (len(header) - 1)}"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines)


def _gb(count: float) -> str:
    return f"{count / 1e9:,.2f} GB"


def _ratio(one: float, other: float) -> str:
    return f"{one / other:.2f}" if other else "no GPU"


def _seconds(time_s: float | None) -> str:
    return "" if time_s is None else f"{time_s:.2f} s"


def _median(rows: Iterable[Result], key: str) -> float:
    return statistics.median(row[key] or 0.0 for row in rows)


_SECTIONS: Mapping[str, tuple[str, Callable[[Result], str]]] = MappingProxyType(
    {
        "machine": ("Machine", _machine),
        "memory": ("Memory: predicted and measured", _memory),
        "speed": ("Speed: the plan and a q8_0 KV cache", _speed),
        "warm-up": ("Warm-up", _warm_up),
        "split": ("A model that does not fit", _split),
        "out-of-memory": ("Out of memory during a load", _out_of_memory),
        "memory-taken": ("Another program takes the memory of a serving GPU", _memory_taken),
        "swap": ("Two models that swap", _swap),
        "replicas": ("Replicas on one GPU", _replicas),
        "ends": ("Kills: what is left on the GPU", _ends),
        "loading": ("Announced end of a load", _loading),
        "usage": ("Usage and energy", _usage),
    }
)
