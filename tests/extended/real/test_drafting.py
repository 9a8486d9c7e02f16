"""Speculative decoding on a real llama-server: which draft models it accepts and uses."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamasup.core.llama_server.help_text import Capabilities
from llamasup.core.planning.facts import demo_draft
from tests.e2e.driver import llamasup, run_to_end
from tests.kit import models, speculative
from tests.kit.architectures import tiny_model as tiny_of
from tests.kit.gguf_writer import write_gguf
from tests.kit.ports import free_port
from tests.kit.tiny import tiny_decoder, tiny_keys, tiny_tensors

STORY: dict[str, Any] = {
    "prompt": "Once upon a time",
    "n_predict": 40,
    "temperature": 0,
    "ignore_eos": True,
}
REFUSED = "the target and draft vocabs are not compatible"


def draft_timings(model: Path, runtime: str, *arguments: str) -> dict[str, Any]:
    """The timings of a completion that llamasup serves."""
    with llamasup(model, "--runtime", runtime, *arguments) as running:
        answer = httpx.post(f"{running.url}/completion", json=STORY, timeout=60).json()
        assert running.stop() == 0
    timings = answer["timings"]
    print(f"draft_n {timings.get('draft_n')}, accepted {timings.get('draft_n_accepted')}")
    assert timings["predicted_n"] == 40
    return dict(timings)


# --- compatibility of target and draft -----------------------------------------------------------


def changed(**changes: Any) -> Callable[[], bytes]:
    return lambda: speculative.changed_decoder(**changes)


CASES: dict[str, tuple[Callable[[], bytes], bool]] = {
    # Whether llama-server drafts with it.
    "itself": (tiny_decoder, True),
    "another EOS, which nothing adds": (changed(eos_token_id=3), True),
    "no BOS stated": (changed(without=("bos_token_id",)), True),
    "another pre-tokenizer": (changed(pre="default"), True),
    "128 words more": (changed(more_words=128), True),
    "129 words more": (changed(more_words=129), False),
    "100 words fewer": (changed(more_words=-100), True),
    "another word": (changed(more_words=0, first_word="altered"), False),
    "another BOS": (changed(bos_token_id=3), False),
    "no BOS added": (changed(add_bos_token=False), False),
    "EOS added": (changed(add_eos_token=True), False),
    "another vocabulary": (models.other_vocabulary, False),
}


def log_of_start(llama_server: str, *arguments: str, completes: bool = False) -> str:
    """The log of llama-server until it listens, or, with ``completes``, has completed a text."""
    port = free_port()
    child = subprocess.Popen(
        [
            llama_server,
            "--ctx-size",
            "512",
            *arguments,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--offline",
        ],
        env={**os.environ, "LD_LIBRARY_PATH": str(Path(llama_server).parent)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    lines = []
    try:
        for line in child.stderr:  # ends when the child does
            lines.append(line)
            if "listening on http" in line:
                if completes:
                    with suppress(httpx.HTTPError):  # it may abort
                        httpx.post(f"http://127.0.0.1:{port}/completion", json=STORY, timeout=60)
                break
    finally:
        child.kill()
        _, rest = child.communicate()
    return "".join(lines) + (rest if completes else "")


@pytest.mark.parametrize("case", CASES)
def test_llamasup_and_llama_server_refuse_the_same_draft_models(
    case: str, llama_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    make, accepted = CASES[case]
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(make())

    log = log_of_start(
        llama_server, "-m", str(tiny_model), "--spec-draft-model", str(draft), "--spec-type", "draft-simple"
    )
    assert "listening on" in log, log
    assert (REFUSED not in log) == accepted, log

    planned = run_to_end("plan", str(tiny_model), "--runtime", llama_server, "--draft-model", str(draft))
    assert planned.returncode == (0 if accepted else 65), planned.stderr
    if not accepted:
        assert "draft.gguf cannot draft for this model" in planned.stderr


def test_llama_server_only_logs_draft_mismatch_not_visible_in_headers(
    llama_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Other words in vocabularies of slightly different size: the texts are compared by llama-server only."""
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(speculative.changed_decoder(more_words=1, first_word="altered"))
    log = log_of_start(
        llama_server, "-m", str(tiny_model), "--spec-draft-model", str(draft), "--spec-type", "draft-simple"
    )
    assert REFUSED in log
    assert "failed to initialize speculative decoding context" in log
    assert "listening on" in log


def test_draft_mismatch_ends_run_before_the_start(
    llama_server: str, tiny_model: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(models.other_vocabulary())
    for arguments in (("--draft-model", str(draft)), ("--", "-md", str(draft))):
        ended = run_to_end("run", str(tiny_model), "--port", "0", "--runtime", llama_server, *arguments)
        assert ended.returncode == 65
        assert "draft.gguf cannot draft for this model: " in ended.stderr
        assert "same family" in ended.stderr
        assert "Traceback" not in ended.stderr


# --- use of the draft model ----------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--spec-draft-model", "--model-draft"])
def test_draft_model_passed_after_double_dash_is_used(flag: str, runtime: str, tiny_model: Path) -> None:
    """b11434 loads it, but uses it only with a flag for its type (#25345), which llamasup adds."""
    assert draft_timings(tiny_model, runtime, "--", flag, str(tiny_model))["draft_n_accepted"] > 0


def test_model_with_mtp_layers_drafts_for_itself(runtime: str, tmp_path: Path) -> None:
    model = tmp_path / "self.gguf"
    model.write_bytes(speculative.self_drafting_decoder())
    assert draft_timings(model, runtime)["draft_n"] > 0


@pytest.mark.parametrize("name", ["qwen35", "glm4moe"])
def test_other_architectures_with_mtp_layers_draft_for_themselves(
    name: str, llama_server: str, tmp_path: Path
) -> None:
    model = tmp_path / f"{name}.gguf"
    model.write_bytes(tiny_of(name))
    flags = ("-m", str(model), "--spec-type", "draft-mtp")
    if "This GGUF does not support multimodal" in log_of_start(llama_server, *flags, completes=True):
        pytest.skip("this build takes the input of these MTP layers for a picture, and aborts (b10068)")
    assert draft_timings(model, llama_server, "--ctx-size", "512")["draft_n"] > 0


def test_estimate_includes_the_context_of_mtp_layers(llama_server: str, tmp_path: Path) -> None:
    model = tmp_path / "self.gguf"
    model.write_bytes(speculative.self_drafting_decoder())
    planned = run_to_end("plan", str(model), "--json", "--runtime", llama_server)
    plan = json.loads(planned.stdout)
    arguments = plan["argv"]
    flags = [*arguments[1 : arguments.index("--host")], *arguments[arguments.index("--ctx-size") :]]
    log = log_of_start(llama_server, *flags, "--verbosity", "4")
    sizes = [
        float(line.split("size =")[1].split("MiB")[0])
        for line in log.splitlines()
        if "llama_kv_cache: size =" in line or "llama_memory_recurrent: size =" in line
    ]
    print(f"logged {sum(sizes)} MiB, estimated {plan['memory']['kv_bytes'] / (1 << 20):.2f} MiB")
    assert len(sizes) == 3  # attention, recurrence, MTP
    assert plan["memory"]["kv_bytes"] / (1 << 20) == pytest.approx(sum(sizes), rel=0.1)


def test_llama_server_fit_measures_the_context_of_mtp_layers(
    llama_server: str, tmp_path: Path, capabilities: Capabilities
) -> None:
    """Older builds did not (#28172). llamasup therefore leaves no room for it."""
    if capabilities.knows("--mlock"):  # removed by #28334
        pytest.skip("this build is older than #28172")
    model = tmp_path / "self.gguf"
    model.write_bytes(speculative.self_drafting_decoder())
    measured = "getting device memory data for the extra model"
    verbose = ("-m", str(model), "--verbosity", "5")
    assert measured in log_of_start(llama_server, *verbose, "--spec-type", "draft-mtp")
    assert measured not in log_of_start(llama_server, *verbose)


# --- heads ---------------------------------------------------------------------------------------


def test_mtp_head_file_drafts_for_its_model_but_is_not_served_alone(
    llama_server: str, runtime: str, tmp_path: Path
) -> None:
    model, head = tmp_path / "self.gguf", tmp_path / "mtp-self.gguf"
    model.write_bytes(speculative.self_drafting_decoder())
    head.write_bytes(speculative.mtp_head())
    assert draft_timings(model, runtime, "--draft-model", str(head))["draft_n"] > 0

    alone = run_to_end("run", str(head), "--port", "0", "--runtime", runtime)
    assert alone.returncode == 65
    assert "is a draft head, not a model that can be served" in alone.stderr
    assert "listening on" not in log_of_start(llama_server, "-m", str(head))  # llama-server crashes


def test_llama_server_detects_dflash_from_the_file_without_a_type_flag(
    llama_server: str, tiny_model: Path, tmp_path: Path, capabilities: Capabilities
) -> None:
    types = capabilities.find("--spec-type")
    if types is None or "draft-dspark" not in types.allowed:
        pytest.skip("this build has no type but draft-dflash for such a file, and does not look into it")
    head = tmp_path / "dflash.gguf"
    head.write_bytes(speculative.draft_head("dflash"))
    log = log_of_start(llama_server, "-m", str(tiny_model), "--spec-draft-model", str(head))
    assert "auto-detected speculative type 'draft-dflash'" in log
    planned = run_to_end("plan", str(tiny_model), "--runtime", llama_server, "--draft-model", str(head))
    assert planned.returncode == 0
    assert "llama-server detects the type of this draft from its file" in planned.stdout


# --- acceptance ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fits", [True, False], ids=["good draft", "poor draft"])
def test_acceptance_is_recorded_and_a_low_one_is_warned_of(
    runtime: str, tiny_model: Path, tmp_path: Path, fits: bool
) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(tiny_decoder() if fits else write_gguf(tiny_keys(), tiny_tensors(seed="another")))
    body = STORY | {"n_predict": 300}
    with llamasup(tiny_model, "--runtime", runtime, "--draft-model", str(draft)) as running:
        timings = httpx.post(f"{running.url}/completion", json=body, timeout=60).json()["timings"]
        if not fits:
            warned = running.wait_for("warning")
            assert "tokens that the draft proposed were accepted" in warned["message"]
        assert running.stop() == 0
        assert fits == (not any(event["event"] == "warning" for event in running.events))
    planned = run_to_end("plan", str(tiny_model), "--runtime", runtime, "--draft-model", str(draft), "--json")
    found = json.loads(planned.stdout)
    assert found["drafts"] == {"proposed": timings["draft_n"], "accepted": timings["draft_n_accepted"]}
    (why,) = (one["reason"] for one in found["reasons"] if one["flag"] == "--spec-draft-n-max")
    assert ("; only " in why) is not fits


def test_demo_model_follows_the_question_and_its_draft_is_mostly_right(runtime: str, tmp_path: Path) -> None:
    draft = tmp_path / "draft.gguf"
    draft.write_bytes(demo_draft())
    ask = {"messages": [{"role": "user", "content": "Tell me a story about a fox."}], "temperature": 0}
    answers = []
    for options in ((), ("--draft-model", str(draft))):
        with llamasup("demo", "--runtime", runtime, *options) as running:
            answers.append(httpx.post(f"{running.url}/v1/chat/completions", json=ask, timeout=60).json())
            assert running.stop() == 0
    for answer in answers:
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert " fox" in choice["message"]["content"].split(".")[0]
    timings = answers[1]["timings"]
    assert timings["draft_n_accepted"] > 0.6 * timings["draft_n"] > 30
