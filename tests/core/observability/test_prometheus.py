"""The text of /metrics."""

from __future__ import annotations

from llamasup.core.observability.prometheus import merged, own_families


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
