"""Settings written back as options mean the same settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from llamasup.cli.model_options import WithExtra, takes_model_options
from llamasup.core.run_arguments import run_arguments
from llamasup.core.settings import Settings

_NOTHING = Settings()
_text = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1).filter(
    lambda text: not text.startswith("-")
)
_count = st.none() | st.integers(0, 1 << 20)

any_settings = st.builds(
    Settings,
    alias=st.none() | _text,
    ctx_size=_count,
    parallel=_count,
    gpu_layers=st.none() | st.sampled_from(["auto", "all"]) | st.integers(0, 99),
    threads=_count,
    kv_type=st.none() | _text,
    flash_attn=st.sampled_from([None, "on", "off", "auto"]),
    draft_model=st.none() | _text,
    mmproj=st.none() | _text,
    profile=st.sampled_from([None, "latency", "throughput", "memory", "plain"]),
    check_memory=st.booleans(),
    extra=st.lists(_text | st.sampled_from(["--temp", "-fa"])).map(tuple),
)


def parsed(words: list[str]) -> tuple[str, Settings]:
    """What the real options make of a command line."""
    app = typer.Typer()
    seen: list[tuple[str, Settings]] = []

    @app.command(cls=WithExtra)
    @takes_model_options
    def run(ctx: typer.Context, model: str, settings: Settings = _NOTHING) -> None:
        seen.append((model, settings))

    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output
    ((model, settings),) = seen
    return model, settings


@settings(deadline=None, max_examples=50)
@given(any_settings)
def test_written_back_and_read_again_they_are_the_same(given: Settings) -> None:
    assert parsed(run_arguments("/srv/m.gguf", given, {}, [])) == ("/srv/m.gguf", given)


def test_other_options_come_before_llama_servers_own() -> None:
    given = replace(_NOTHING, ctx_size=512, extra=("--temp", "0"))
    words = run_arguments("m.gguf", given, {"--port": "0"}, ["--no-warmup"])
    assert words == ["run", "m.gguf", "--ctx-size", "512", "--port", "0", "--no-warmup", "--", "--temp", "0"]


@pytest.mark.parametrize(
    "field", [field for field in Settings.__slots__ if field not in ("extra", "check_memory")]
)
def test_no_setting_is_forgotten(field: str) -> None:
    """A field that is new here must get its option."""
    given: Any = {field: "on"}
    assert "on" in run_arguments("m.gguf", replace(_NOTHING, **given), {}, [])
