"""The text of /metrics, and the table of metrics in docs/observability.md."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from llamasup.core.observability.prometheus import merged, own_families
from tests.kit.paths import ROOT
from tests.kit.script import run_script


def test_the_families_of_the_documentation_are_those_of_llamasup() -> None:
    names = [family.name for family in own_families()]
    assert len(set(names)) == len(names) > 10
    assert all(name.startswith("llamasup_") for name in names)


def test_samples_of_several_servers_share_one_header() -> None:
    head = "# HELP llamacpp:n_tokens_max Largest.\n# TYPE llamacpp:n_tokens_max counter\n"
    scraped = {
        "a": f'{head}llamacpp:n_tokens_max 5\n{{not a sample}}\nllamacpp:n_tokens_max{{slot="1"}} 6\n',
        'b"': f"{head}llamacpp:n_tokens_max 7\n",
    }
    assert merged(scraped).decode() == (
        f'{head}llamacpp:n_tokens_max{{model="a"}} 5\n'
        'llamacpp:n_tokens_max{model="a",slot="1"} 6\n'
        'llamacpp:n_tokens_max{model="b\\""} 7\n'
    )


DOC = ROOT / "docs" / "observability.md"


write = partial(run_script, "metrics_table.py")


def test_the_table_is_current() -> None:
    done = write("--check")
    assert done.returncode == 0, done.stderr


def test_stale_table_is_detected_and_rewritten(tmp_path: Path) -> None:
    stale = tmp_path / "observability.md"
    stale.write_text(
        DOC.read_text("utf-8").replace("| `llamasup_replays_total`", "| `llamasup_reruns_total`")
    )
    done = write("--check", "--doc", str(stale))
    assert (done.returncode, "is stale" in done.stderr) == (1, True)
    assert write("--doc", str(stale)).returncode == 0
    assert stale.read_text("utf-8") == DOC.read_text("utf-8")
