"""The requests of a proof."""

from __future__ import annotations

from llamasup.features.upgrade.proof import _request


def test_idle_server_gets_the_requests_in_the_slot_that_clients_get_last() -> None:
    assert _request(0, None, is_idle=True).body["id_slot"] == 0
    assert "id_slot" not in _request(0, None, is_idle=False).body


def test_prompts_repeat_and_fit_into_the_context() -> None:
    assert _request(0, None, is_idle=True) == _request(8, None, is_idle=True)
    assert _request(0, None, is_idle=True) != _request(1, None, is_idle=True)
    assert len(_request(3, 64, is_idle=True).body["prompt"]) == 32
