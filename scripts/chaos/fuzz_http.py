"""Fuzzing of the proxy's HTTP against h11 (X9), and of how it counts jobs in bodies against a decoder (X8).

Run it with ``scripts/chaos/fuzz http``.

Paths use every spelling that a server could accept, with a key whose limit is used up (X8), and paths of the
control API with each right (X4). The grammars and
the comparisons are those of tests/security/test_against_h11.py and of tests/core/http/test_body_scan.py. For
a finding, the script prints a minimal input and exits with 1.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from llamasup.core.proxy import ProxyConfig
from tests.core.http.test_body_scan import counted_as_the_oracle_counts
from tests.kit.bodies import LABELS, bodies
from tests.security import test_against_h11 as comparisons
from tests.security.circuit import Circuit
from tests.security.control_paths import KEYS, reaches_no_more_than_its_right
from tests.security.grammar import (
    bodiless_responses,
    control_requests,
    cut,
    repeated_requests,
    repeated_responses,
    requests,
    responses,
    spelled_paths,
)
from tests.security.limited_key import circuit_of_a_used_up_key, gets_past_no_limit

_BATCH = 500  # hypothesis remembers what it has tried: a new start keeps its memory bounded

Check = Callable[[Circuit, st.DataObject], None]


def read_as_h11_does(circuit: Circuit, data: st.DataObject) -> None:
    comparisons.as_h11_reads(circuit, data.draw(requests()))


def read_as_h11_does_again(circuit: Circuit, data: st.DataObject) -> None:
    comparisons.as_h11_reads(circuit, *data.draw(repeated_requests()))


def read_the_same_in_pieces(circuit: Circuit, data: st.DataObject) -> None:
    raw = data.draw(requests())
    comparisons.the_same_in_pieces(circuit, raw, data.draw(cut(raw)))


def answered_whole_or_not(circuit: Circuit, data: st.DataObject) -> None:
    raw, method = data.draw(responses()), data.draw(st.sampled_from([b"GET", b"POST", b"HEAD"]))
    comparisons.answered_whole_or_not(circuit, raw, method, closes=data.draw(st.booleans()))


def answered_whole_or_not_again(circuit: Circuit, data: st.DataObject) -> None:
    for raw in data.draw(repeated_responses()):
        comparisons.answered_whole_or_not(circuit, raw, b"GET", closes=False)


def bodiless_and_then_right(circuit: Circuit, data: st.DataObject) -> None:
    comparisons.the_next_is_right(circuit, *data.draw(bodiless_responses()), idle=data.draw(st.booleans()))


def limited_in_any_spelling(circuit: Circuit, data: st.DataObject) -> None:
    gets_past_no_limit(circuit, data.draw(spelled_paths()))


def jobs_are_counted(circuit: Circuit, data: st.DataObject) -> None:
    """Whole and in pieces: at least as many as llama-server begins. Nothing is sent."""
    circuit.records.clear()
    body, label = data.draw(bodies()), data.draw(st.sampled_from(sorted(LABELS)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=5)))
    counted_as_the_oracle_counts(body, label, cuts)


def control_gives_no_more_than_a_right(circuit: Circuit, data: st.DataObject) -> None:
    """The paths of the control API, as the proxy and the control application read them. Nothing is sent."""
    circuit.records.clear()
    reaches_no_more_than_its_right(*data.draw(control_requests()), data.draw(st.sampled_from(KEYS)))


_CHECKS: tuple[Check, ...] = (
    read_as_h11_does,
    read_as_h11_does_again,
    read_the_same_in_pieces,
    answered_whole_or_not,
    answered_whole_or_not_again,
    bodiless_and_then_right,
    limited_in_any_spelling,
    jobs_are_counted,
    control_gives_no_more_than_a_right,
)


class Fuzzer:
    """Runs the checks and counts the outcomes, which show a grammar that generates only nonsense."""

    def __init__(self, circuit: Circuit, limited: Circuit, seconds: float) -> None:
        self._circuits = dict.fromkeys(_CHECKS, circuit) | {limited_in_any_spelling: limited}
        self._until = time.monotonic() + seconds
        self.executions = 0
        self.became: dict[str, Counter[str]] = {check.__name__: Counter() for check in _CHECKS}

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def batch(self, check: Check, batch_seed: int) -> None:
        """Run one batch. Raises the exception of a finding, with a minimal input."""

        @seed(batch_seed)
        @settings(
            max_examples=_BATCH,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        @given(data=st.data())
        def fuzz(data: st.DataObject) -> None:
            circuit = self._circuits[check]
            check(circuit, data)
            self.executions += 1
            self.became[check.__name__].update(record.outcome for record in circuit.records)

        fuzz()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("seconds", type=float, nargs="?", default=60.0)
    parser.add_argument("first_seed", type=int, nargs="?", default=0)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder, name) for name in ("open", "limited")]
        for one_folder in folders:
            one_folder.mkdir()
        circuit, limited = Circuit(folders[0], ProxyConfig()), circuit_of_a_used_up_key(folders[1])
        fuzzer = Fuzzer(circuit, limited, options.seconds)
        batch_seed = options.first_seed
        try:
            while not fuzzer.is_over:
                for check in _CHECKS:
                    if not fuzzer.is_over:
                        fuzzer.batch(check, batch_seed)
                batch_seed += 1
        finally:
            circuit.close()
            limited.close()
            for name, outcomes in fuzzer.became.items():
                print(f"{name}: {dict(outcomes)}")
            print(f"{fuzzer.executions} executions, seeds from {options.first_seed} to {batch_seed}")
