"""References, the choice of files in a repository, and the allowed targets of a download."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime

import pytest

from llamasup.core.hub import remote_file
from llamasup.core.hub.choose import Choice, RepoFile, choose
from llamasup.core.hub.reference import (
    HUB,
    Ref,
    RepoRef,
    UrlRef,
    is_reference,
    is_safe_path,
    local_path,
    names_of,
    origin_of,
    parse_ref,
    resolve_url,
    shown_url,
    split_urls,
    tree_url,
)
from llamasup.core.hub.remote_file import (
    ContentRange,
    RemoteFile,
    content_range,
    linked_sha256,
    parse_retry_after,
    strong_etag,
    why_not_resumed,
)
from llamasup.errors import (
    AccessDenied,
    DownloadFailed,
    DownloadRefused,
    LlamasupError,
    ModelInvalid,
    ModelMissing,
    UsageInvalid,
)
from llamasup.features.downloads.hub_responses import is_transient, next_page, read_page, refusal
from llamasup.features.downloads.url_policy import UrlPolicy, is_public

DIGEST = "ab" * 32

# --- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("org/repo", RepoRef("org/repo")),
        ("Org-1/repo.x_y-GGUF:Q4_K_M", RepoRef("Org-1/repo.x_y-GGUF", quant="Q4_K_M")),
        ("org/repo:model-q8_0.gguf", RepoRef("org/repo", file="model-q8_0.gguf")),
        (
            "org/repo:BF16/model-00001-of-00002.gguf",
            RepoRef("org/repo", file="BF16/model-00001-of-00002.gguf"),
        ),
        ("hf:org/repo", RepoRef("org/repo")),
        ("hf:org/repo:Q8_0", RepoRef("org/repo", quant="Q8_0")),
        ("hf://org/repo", RepoRef("org/repo")),
        ("hf://org/repo/sub/m.gguf", RepoRef("org/repo", file="sub/m.gguf")),
        ("hf.co/org/repo:Q4_0", RepoRef("org/repo", quant="Q4_0")),
        ("https://huggingface.co/org/repo", RepoRef("org/repo")),
        ("https://huggingface.co/org/repo#usage", RepoRef("org/repo")),  # a heading of the page
        ("https://huggingface.co/org/repo:Q4_0", RepoRef("org/repo", quant="Q4_0")),
        ("https://huggingface.co/org/repo/tree/main", RepoRef("org/repo")),
        ("https://huggingface.co/org/repo/blob/main/m.gguf", RepoRef("org/repo", file="m.gguf")),
        (
            "https://huggingface.co/org/repo/resolve/v1.0/a%20b/m.gguf?download=true",
            RepoRef("org/repo", file="a b/m.gguf", revision="v1.0"),
        ),
        ("https://hub.local/org/repo/resolve/main/m.gguf", RepoRef("org/repo", file="m.gguf")),
        (
            f"https://hub.local/org/repo/resolve/v1/m.gguf#sha256={DIGEST}",
            RepoRef("org/repo", file="m.gguf", revision="v1", sha256=DIGEST),
        ),
        ("https://hub.local:9/org/repo/m.gguf", UrlRef("https://hub.local:9/org/repo/m.gguf")),
        ("https://example.com/m.gguf?sig=1", UrlRef("https://example.com/m.gguf?sig=1")),
        (f"https://example.com/m.gguf#sha256={DIGEST.upper()}", UrlRef("https://example.com/m.gguf", DIGEST)),
        ("http://[::1]:80/m.gguf", UrlRef("http://[::1]:80/m.gguf")),
        ("https://huggingface.co/datasets/org/x.gguf", UrlRef("https://huggingface.co/datasets/org/x.gguf")),
    ],
)
def test_references_are_parsed(text: str, ref: Ref) -> None:
    assert parse_ref(text, "https://hub.local") == ref
    assert is_reference(text)


@pytest.mark.parametrize(
    "text",
    ["", "m.gguf", "folder/m.gguf", "./org/repo", "/org/repo", "~/repo", "a/b/c", "demo", "org/", "a b/c"],
)
def test_paths_and_names_are_not_references(text: str) -> None:
    assert parse_ref(text) is None
    assert not is_reference(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("org/re..po", "is not a valid repository"),
        ("hf:org", "is not a valid repository"),
        ("hf://org/repo/a/m.bin", "neither a quantization nor"),
        ("org/repo:", "neither a quantization nor"),
        ("org/repo:../m.gguf", "is not a valid path in a repository"),
        ("https://user:secret@example.com/m.gguf", "user name or a password"),
        ("https:///m.gguf?sig=secret", "no host"),
        ("https://[::1/m.gguf?sig=secret", "The URL is invalid"),
        ("HTTPS://example.com:99999/m.gguf?sig=secret", "The URL is invalid"),
        ("https://example.com:x/m.gguf", "The URL is invalid"),
        ("https://example.com/m.bin", "does not end in"),
        ("https://example.com", "does not end in"),
        ("https://example.com/a/../../m.gguf", "does not end in"),
        ("https://example.com/m.gguf#part", "not a checksum"),
        ("https://huggingface.co/org/repo/resolve/main/m.gguf#part", "not a checksum"),
        (f"https://huggingface.co/org/repo#sha256={DIGEST}", "names no file"),
        ("https://huggingface.co/org/repo/blob/main/README.md", "not a .gguf file"),
        ("https://huggingface.co/org/repo/discussions/1", "neither a repository nor"),
    ],
)
def test_invalid_reference_has_a_remedy(text: str, why: str) -> None:
    with pytest.raises(UsageInvalid, match=why) as caught:
        parse_ref(text)
    assert caught.value.remedy
    assert "secret" not in caught.value.message + caught.value.remedy
    assert is_reference(text)


def test_url_is_shown_without_secrets() -> None:
    assert shown_url("https://u:p@[::1]:8443/a%20b.gguf?X-Signature=s#f") == "https://[::1]:8443/a%20b.gguf"
    assert shown_url("https://h:x/a") == "an invalid URL"
    assert str(UrlRef("https://h/m.gguf?sig=1")) == "https://h/m.gguf"
    assert str(RepoRef("o/r")) == "o/r"
    assert str(RepoRef("o/r", quant="Q8_0")) == "o/r:Q8_0"


def test_urls_of_the_hub() -> None:
    ref = RepoRef("o/r", revision="refs/pr/1")
    assert tree_url(HUB, ref).startswith(
        "https://huggingface.co/api/models/o/r/tree/refs%2Fpr%2F1?recursive=true"
    )
    assert (
        resolve_url("https://h/base", ref, "a b/m#.gguf", "main")
        == "https://h/base/o/r/resolve/main/a%20b/m%23.gguf"
    )
    with pytest.raises(ValueError, match="scheme"):
        origin_of("ftp://h/x")


def test_urls_of_a_split_model() -> None:
    urls = split_urls("https://h/m-00002-of-00003.gguf?sig=1")
    assert urls == tuple(f"https://h/m-0000{part}-of-00003.gguf?sig=1" for part in (1, 2, 3))
    assert split_urls("https://h/m.gguf") == ("https://h/m.gguf",)
    assert split_urls("https://h/m-00001-of-00000.gguf") == ("https://h/m-00001-of-00000.gguf",)


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["m.gguf", "sub/m.gguf", "モデル-Q4_K_M.gguf", "a+b@c (1).gguf"])
def test_safe_paths_are_accepted(path: str) -> None:
    assert is_safe_path(path)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "",
            "../m.gguf",
            "a/../m.gguf",
            "/etc/m.gguf",
            "a//m.gguf",
            ".hidden/m.gguf",
            "~/m.gguf",
            "a\\m.gguf",
        ),
        *("C:m.gguf", "m\n.gguf", "m\u202e.gguf", "a./m.gguf", "a /m.gguf", f"{'x' * 300}.gguf", "x/" * 600),
    ],
)
def test_unsafe_paths_are_refused(path: str) -> None:
    assert not is_safe_path(path)


def test_local_paths_of_files() -> None:
    assert str(local_path(RepoRef("o/r"), "BF16/m.gguf")) == "o/r/BF16/m.gguf"
    assert str(local_path(UrlRef("https://Example.com/m.gguf"), "/m.gguf")) == "@example.com/m.gguf"
    assert str(local_path(UrlRef("http://[::1]:81/a/b/m.gguf"), "/a/b/m.gguf")) == "@__1_81/a--b/m.gguf"


def test_different_urls_have_different_local_paths() -> None:
    def place(path: str) -> str:
        return str(local_path(UrlRef("https://h/x"), path))

    paths = [
        "/a/b--c/x",
        "/a--b/c/x",
        "/a/b/c/x",
        "/a-/b/c/x",
        "/a/-b/c/x",
        f"/{'ü' * 300}/x",
        f"/1{'ü' * 300}/x",
    ]
    assert len({place(path) for path in paths}) == len(paths)
    for path in paths:
        assert all(len(name.encode()) <= 220 for name in place(path).split("/"))


def test_recorded_names_hide_signatures() -> None:
    plain, signed = names_of(UrlRef("https://h/m-00002-of-00002.gguf?sig=secret"))
    assert plain == "https://h/m-00001-of-00002.gguf"
    assert signed.startswith(f"{plain}?")
    assert "secret" not in signed
    assert names_of(UrlRef(plain)) == (plain,)
    assert names_of(RepoRef("o/r", quant="q4", revision="v1")) == ("v1:q4",)
    assert names_of(RepoRef("o/r", file="a/m.gguf")) == ("main:a/m.gguf",)


# --- the choice of files ------------------------------------------------------------------------


def files(*paths: str) -> list[RepoFile]:
    return [RepoFile(path, 1000) for path in paths]


def chosen(ref: str, *paths: str) -> Choice:
    parsed = parse_ref(ref)
    assert isinstance(parsed, RepoRef)
    return choose(parsed, files(*paths, "README.md"))


def names(choice: Choice) -> list[str]:
    return [file.path for file in choice.files]


@pytest.mark.parametrize(
    ("there", "expected", "name"),
    [
        (["m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-f16.gguf"], "m-Q4_K_M.gguf", "Q4_K_M"),
        (["m.q8_0.gguf", "m.q4_k_s.gguf", "m.q2_k.gguf"], "m.q4_k_s.gguf", "Q4_K_S"),
        (["m-Q8_0.gguf", "m-Q2_K.gguf"], "m-Q8_0.gguf", "Q8_0"),
        (["m-F16.gguf", "m-IQ1_S.gguf"], "m-F16.gguf", "F16"),
        (["m-fp16.gguf", "m-fp32.gguf"], "m-fp16.gguf", "F16"),
        (["m-mxfp4.gguf", "m-Q8_0.gguf"], "m-mxfp4.gguf", "MXFP4"),
        (["m-UD-Q4_K_XL.gguf", "m-Q5_K_M.gguf"], "m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        (["strange.gguf"], "strange.gguf", "strange.gguf"),
        (["Q8_0/model.gguf", "Q4_K_M/model.gguf"], "Q4_K_M/model.gguf", "Q4_K_M"),
        (["old/m-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
    ],
)
def test_default_quantization_or_the_closest_is_chosen(there: list[str], expected: str, name: str) -> None:
    choice = chosen("o/r", *there)
    assert names(choice) == [expected]
    assert choice.name == name
    assert choice.reason
    again = f"o/r:{choice.name}"
    assert names(chosen(again, *there)) == [expected]


def test_reason_names_the_missing_default() -> None:
    assert "the default of llama.cpp" in chosen("o/r", "m-Q4_K_M.gguf", "m-Q8_0.gguf").reason
    assert "no Q4_K_M" in chosen("o/r", "m-Q4_0.gguf", "m-Q8_0.gguf").reason
    assert "the only model" in chosen("o/r", "m.gguf").reason


@pytest.mark.parametrize(
    ("quant", "expected"),
    [
        ("Q8_0", "m-Q8_0.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("Q5", "m-Q5_K_M.gguf"),
        ("UD-Q2_K_XL", "m-UD-Q2_K_XL.gguf"),
        ("Q2_K_XL", "m-UD-Q2_K_XL.gguf"),
        ("thinking", "m-thinking-Q6_K.gguf"),
    ],
)
def test_requested_quantization_is_chosen(quant: str, expected: str) -> None:
    there = ["m-Q8_0.gguf", "m-Q5_0.gguf", "m-Q5_K_M.gguf", "m-UD-Q2_K_XL.gguf", "m-thinking-Q6_K.gguf"]
    assert names(chosen(f"o/r:{quant}", *there)) == [expected]


def test_missing_quantization_is_never_replaced() -> None:
    with pytest.raises(ModelMissing, match="has no quantization Q3_K_M") as caught:
        chosen("o/r:Q3_K_M", "m-Q8_0.gguf", "strange.gguf")
    assert "o/r:Q8_0" in caught.value.remedy
    assert len(caught.value.details) == 2


def test_file_is_chosen_by_name_or_path() -> None:
    there = ["a/m-Q8_0.gguf", "b/m-Q8_0.gguf", "mmproj-F16.gguf"]
    assert names(chosen("o/r:b/m-Q8_0.gguf", *there)) == ["mmproj-F16.gguf", "b/m-Q8_0.gguf"]
    assert names(chosen("o/r:MMPROJ-f16.gguf", *there)) == ["mmproj-F16.gguf"]
    with pytest.raises(UsageInvalid, match="2 models") as caught:
        chosen("o/r:m-Q8_0.gguf", *there)
    assert "o/r:a/m-Q8_0.gguf" in caught.value.remedy
    with pytest.raises(ModelMissing, match="has no file"):
        chosen("o/r:c.gguf", *there)


def test_exact_choice_ignores_similar_names() -> None:
    there = files("q4/m.gguf", "m-UD-Q4_K_M.gguf", "m-Q8_0.gguf")
    for near in ("o/r:q8", "o/r:Q4_K_M", "o/r:q8/m.gguf", "o/r:M.gguf"):
        ref = parse_ref(near)
        assert isinstance(ref, RepoRef)
        with pytest.raises(ModelMissing):
            choose(ref, there, exact=True)
    assert names(choose(RepoRef("o/r", quant="q8_0"), there, exact=True)) == ["m-Q8_0.gguf"]
    assert names(choose(RepoRef("o/r", file="q4/m.gguf"), there, exact=True)) == ["q4/m.gguf"]


def test_two_models_of_one_quantization_are_an_error() -> None:
    for ref in ("o/r", "o/r:Q4_K_M", "o/r:q4"):
        with pytest.raises(UsageInvalid, match="2 models") as caught:
            chosen(ref, "one-Q4_K_M.gguf", "two-Q4_K_M.gguf")
        assert caught.value.details


def test_list_of_unsafe_files_is_shortened() -> None:
    notes = chosen("o/r", "m.gguf", *(f"../{number}.gguf" for number in range(1000)), "x" * 2000).notes
    assert "'../0.gguf' is ignored: its name is not safe" in notes[0]
    assert notes[-1] == "and 995 more"
    assert len(notes) == 6


@pytest.mark.parametrize("name", ["{}-Q4_K_M.gguf", "../{}.gguf"])
def test_time_of_a_choice_grows_linearly_with_the_files(name: str) -> None:
    def taken_s(count: int) -> float:
        files = [RepoFile(name.format(number), 1) for number in range(count)]
        began_s = time.thread_time()
        with pytest.raises((UsageInvalid, ModelMissing)):
            choose(RepoRef("o/r"), files)
        return time.thread_time() - began_s

    small_s, large_s = (min(taken_s(count) for _ in range(3)) for count in (250, 4000))
    assert large_s < 64 * small_s  # 16 times as many files; comparing all pairs would take 256 times as long


def test_split_model_has_its_parts_in_order() -> None:
    parts = [f"Q4_K_M/m-Q4_K_M-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    choice = chosen("o/r", parts[2], "m-Q8_0.gguf", parts[0], parts[1])
    assert [part.path for part in choice.parts] == parts
    assert choice.size_bytes == 3000
    assert [part.path for part in chosen(f"o/r:{parts[1]}", *parts).parts] == parts


def test_model_with_a_missing_part_is_refused() -> None:
    with pytest.raises(ModelInvalid, match="2 of the 3 parts") as caught:
        chosen("o/r", "m-Q4_K_M-00001-of-00003.gguf", "m-Q4_K_M-00003-of-00003.gguf")
    assert "(2 of 3 parts)" in caught.value.details[0]


def test_drafts_matrices_and_projectors_are_not_models() -> None:
    others = ["mtp-m.gguf", "eagle3-m.gguf", "imatrix.gguf", "mmproj-F16.gguf"]
    assert [part.path for part in chosen("o/r", "m.gguf", *others).parts] == ["m.gguf"]
    for ref in ("o/r", "o/r:Q8_0"):
        with pytest.raises(ModelMissing, match=r"no GGUF file of a model|has no quantization Q8_0") as caught:
            chosen(ref, *others)
        assert "-GGUF" in caught.value.remedy


@pytest.mark.parametrize(
    ("model", "projectors", "expected"),
    [
        ("m-Q4_K_M.gguf", ["mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"], "mmproj-F16.gguf"),
        ("m-Q4_K_M.gguf", ["mmproj-Q8_0.gguf"], "mmproj-Q8_0.gguf"),
        ("m-Q4_K_M.gguf", ["mmproj-odd.gguf"], "mmproj-odd.gguf"),
        ("sub/m-Q4_K_M.gguf", ["mmproj-F16.gguf", "sub/mmproj-Q8_0.gguf"], "sub/mmproj-Q8_0.gguf"),
        ("sub/m-Q4_K_M.gguf", ["mmproj-F16.gguf", "other/mmproj-F16.gguf"], "mmproj-F16.gguf"),
        ("a-2b-Q4_K_M.gguf", ["mmproj-a-2b-f16.gguf", "mmproj-a-7b-f16.gguf"], "mmproj-a-2b-f16.gguf"),
        ("m-Q4_K_M.gguf", ["other/mmproj-F16.gguf"], None),
        ("m-Q4_K_M.gguf", ["mmproj-a.gguf", "mmproj-b.gguf"], None),
    ],
)
def test_projector_of_a_model_is_chosen(model: str, projectors: Sequence[str], expected: str | None) -> None:
    choice = chosen(f"o/r:{model}", model, *projectors)
    assert (choice.projector.path if choice.projector else None) == expected
    assert bool(choice.notes) == (len(projectors) == 2 and expected is None)


def test_unsafe_files_are_ignored_with_a_note() -> None:
    choice = chosen("o/r", "m.gguf", "../../evil-Q4_K_M.gguf", "a/../Q4_K_M.gguf")
    assert names(choice) == ["m.gguf"]
    assert len(choice.notes) == 2


def test_long_list_is_shortened() -> None:
    with pytest.raises(ModelMissing) as caught:
        chosen("o/r:Q3_K_M", *(f"m{number}-Q8_0.gguf" for number in range(50)))
    assert caught.value.details[-1] == "and 10 more"


# --- answers of the hub ---------------------------------------------------------------------------


def test_page_of_the_file_list() -> None:
    page = (
        b'[{"type":"directory","path":"sub","oid":"1","size":0},{"type":"file","path":"a.gguf","size":3,"oid":"2"},'
        b'{"type":"file","path":"b.gguf","size":9,"lfs":{"oid":"' + DIGEST.encode() + b'","size":9}},'
        b'{"type":"file","path":"c.gguf","size":9,"lfs":{"oid":"short"}}]'
    )
    assert read_page(page) == (RepoFile("a.gguf", 3), RepoFile("b.gguf", 9, DIGEST), RepoFile("c.gguf", 9))
    for wrong in (b"<html>", b'{"error":"x"}', b'[{"path":1}]', b"\xff"):
        with pytest.raises(DownloadFailed, match="is invalid"):
            read_page(wrong)


def test_next_page_stays_on_the_same_host() -> None:
    link = '<https://huggingface.co/api/models/o/r/tree/main?cursor=x%3D>; rel="next"'
    assert next_page(link, "https://mirror:1/api/models/o/r/tree/main") == (
        "https://mirror:1/api/models/o/r/tree/main?cursor=x%3D"
    )
    assert next_page("</a?b=1>; rel=next", "https://h/x") == "https://h/a?b=1"
    assert next_page('<https://h/1>; rel="prev"', "https://h/x") is None
    assert next_page(None, "https://h/x") is None
    with pytest.raises(DownloadFailed, match="an invalid URL"):
        next_page('<http://[>; rel="next"', "https://h/x")


REPO = RepoRef("o/r", file="m.gguf", revision="v2")
URL = UrlRef("https://h/m.gguf")


@pytest.mark.parametrize(
    ("ref", "status", "headers", "token", "kind", "said"),
    [
        (REPO, 403, {"x-error-code": "GatedRepo"}, False, AccessDenied, "is gated"),
        (REPO, 401, {"x-error-code": "GatedRepo"}, True, AccessDenied, "is gated"),
        (REPO, 403, {}, True, AccessDenied, "is gated"),
        (
            REPO,
            401,
            {"x-error-code": "RepoNotFound"},
            False,
            AccessDenied,
            "The repository o/r does not exist or is private",
        ),
        (REPO, 401, {}, True, AccessDenied, "The server denied access to"),
        (URL, 403, {}, False, AccessDenied, "The server denied access to"),
        (
            REPO,
            404,
            {"x-error-code": "RevisionNotFound"},
            False,
            ModelMissing,
            "The revision 'v2' of o/r does not exist",
        ),
        (REPO, 404, {"x-error-code": "EntryNotFound"}, False, ModelMissing, "o/r:m.gguf does not exist"),
        (REPO, 404, {}, False, ModelMissing, "The repository o/r does not exist"),
        (URL, 410, {}, False, ModelMissing, "https://h/m.gguf does not exist"),
        (REPO, 451, {"x-error-message": "removed"}, False, AccessDenied, "451: removed"),
        (REPO, 503, {}, False, DownloadFailed, "cannot be downloaded"),
        (URL, 416, {}, False, DownloadFailed, "cannot be downloaded"),
    ],
)
def test_errors_of_the_hub(
    ref: Ref, status: int, headers: dict[str, str], token: bool, kind: type[LlamasupError], said: str
) -> None:
    error = refusal(ref, "https://h/x?sig=secret", status, headers, endpoint=HUB, with_token=token)
    assert type(error) is kind
    assert said in error.message
    assert error.remedy
    assert "secret" not in error.message


def test_transient_statuses() -> None:
    assert [status for status in (200, 400, 401, 404, 408, 425, 429, 500, 503) if is_transient(status)] == [
        *(408, 425, 429, 500, 503)
    ]


# --- allowed targets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *(("8.8.8.8", True), ("2606:4700::1111", True), ("::ffff:8.8.8.8", True), ("64:ff9b::808:808", True)),
        *(("127.0.0.1", False), ("10.0.0.1", False), ("172.16.0.1", False), ("192.168.1.1", False)),
        *(("169.254.169.254", False), ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False)),
        *(("::1", False), ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:127.0.0.1", False)),
        *(("64:ff9b::7f00:1", False), ("2002:7f00:1::", False), ("255.255.255.255", False), ("x", False)),
        *(("ff02::1", False), ("::", False), ("fec0::1", False), ("64:ff9b:1::7f00:1", False)),
        *(("::7f00:1", False), ("::ffff:0:7f00:1", False)),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


def test_private_addresses_are_refused() -> None:
    reach = UrlPolicy(HUB)
    assert reach.allowed("https://h/x", ["10.0.0.1", "8.8.8.8"]) == ["8.8.8.8"]
    with pytest.raises(DownloadRefused, match=r"10\.0\.0\.1") as caught:
        reach.allowed("https://h/x?sig=secret", ["10.0.0.1", "::1"])
    assert "--allow-private" in caught.value.remedy
    assert "secret" not in caught.value.message
    assert UrlPolicy(HUB, private=True).allowed("https://h/x", ["10.0.0.1"]) == ["10.0.0.1"]
    assert UrlPolicy("https://mirror:1").allowed("https://mirror:1/x", ["10.0.0.1"]) == ["10.0.0.1"]


def test_plain_http_is_allowed_for_a_local_hub_only() -> None:
    UrlPolicy(HUB).check_url("https://h/x")
    UrlPolicy("http://127.0.0.1:1").check_url("http://127.0.0.1:1/x")
    UrlPolicy("http://localhost:1").check_url("http://localhost:1/x")
    UrlPolicy(HUB, http=True).check_url("http://h/x")
    for reach, url in [
        (UrlPolicy(HUB), "http://huggingface.co/x"),
        (UrlPolicy("http://mirror"), "http://mirror/x"),
        (UrlPolicy("http://127.0.0.1:1"), "http://127.0.0.1:2/x"),
        (UrlPolicy(HUB), "file:///etc/passwd"),
        (UrlPolicy(HUB), "https:///x"),
    ]:
        with pytest.raises(DownloadRefused):
            reach.check_url(url)


def test_only_the_hub_gets_the_token() -> None:
    assert UrlPolicy(HUB).allows_token("https://huggingface.co/o/r")
    assert UrlPolicy("http://127.0.0.1:1").allows_token("http://127.0.0.1:1/x")
    for url in ("https://cdn.huggingface.co/x", "http://huggingface.co/x", "https://huggingface.co:444/x"):
        assert not UrlPolicy(HUB).allows_token(url)
    assert not UrlPolicy("http://mirror", http=True).allows_token("http://mirror/x")


# --- the file on the server ------------------------------------------------------------------------


def test_reasons_against_resuming() -> None:
    one = RemoteFile(10, DIGEST, "a")
    assert why_not_resumed(one, RemoteFile(10, DIGEST, "b")) == ""
    assert "checksum" in why_not_resumed(one, RemoteFile(10, "cd" * 32, "a"))
    assert "changed from 10 to 11 bytes" in why_not_resumed(one, RemoteFile(11, DIGEST, "a"))
    assert why_not_resumed(RemoteFile(10, None, "a"), RemoteFile(10, DIGEST, "a")) == ""
    assert "changed" in why_not_resumed(RemoteFile(10, None, "a"), RemoteFile(10, None, "b"))
    assert "gives no checksum or ETag" in why_not_resumed(RemoteFile(10), RemoteFile(10, None, "b"))


def test_content_range_headers() -> None:
    assert content_range("bytes 0-9/100") == ContentRange(0, 10, 100)
    assert content_range("bytes 5-5/*") == ContentRange(5, 6, None)
    for wrong in (None, "", "bytes */100", "bytes 9-0/100", "bytes 0-100/100", "items 0-9/100", "bytes 0-9"):
        assert content_range(wrong) is None
    assert strong_etag('"abc"') == "abc"
    assert strong_etag('W/"abc"') is None
    assert strong_etag(None) is None
    assert linked_sha256({"x-linked-etag": f'"{DIGEST}"'}) == DIGEST
    assert linked_sha256({"x-linked-etag": '"abc"'}) is None
    assert linked_sha256({}) is None


def test_retry_after_headers() -> None:
    now = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
    assert parse_retry_after("7", now) == 7.0
    assert parse_retry_after("Thu, 01 Jan 2026 12:00:30 GMT", now) == 30.0
    assert parse_retry_after("Thu, 01 Jan 2026 11:00:00 GMT", now) == 0.0
    assert parse_retry_after("soon", now) is None
    assert parse_retry_after("Thu, 01 Jan 99999999999 12:00:00 GMT", now) is None
    assert parse_retry_after(None, now) is None


# --- ranges ------------------------------------------------------------------------------------------


def test_touching_ranges_are_joined() -> None:
    ranges: remote_file.Ranges = ()
    for start, end in [(10, 20), (30, 40), (0, 0), (20, 30), (0, 5), (4, 11)]:
        ranges = remote_file.added(ranges, start, end)
    assert ranges == ((0, 40),)
    assert remote_file.added(((0, 5), (20, 30)), 10, 15) == ((0, 5), (10, 15), (20, 30))


def test_missing_ranges_and_prefix() -> None:
    here = ((0, 10), (20, 30))
    assert remote_file.missing(here, 40) == ((10, 20), (30, 40))
    assert remote_file.missing((), 40) == ((0, 40),)
    assert remote_file.missing(((0, 40),), 40) == ()
    assert remote_file.prefix(here) == 10
    assert remote_file.prefix(((5, 10),)) == 0
    assert remote_file.prefix(()) == 0
    assert remote_file.total(here) == 20


def test_invalid_ranges_are_dropped() -> None:
    assert remote_file.checked(((0, 10), (20, 30)), 30) == ((0, 10), (20, 30))
    for wrong in (((0, 31),), ((10, 5),), ((0, 10), (10, 20)), ((5, 10), (0, 3)), ((-5, 3),)):
        assert remote_file.checked(wrong, 30) == ()


def test_sizes_of_requests_are_bounded() -> None:
    assert remote_file.piece_bytes(1 << 20, 4) == 16 << 20
    assert remote_file.piece_bytes(1 << 34, 4) == 1 << 30
    assert remote_file.piece_bytes(1 << 30, 4) == 64 << 20
    assert list(remote_file.pieces(((0, 5), (7, 8)), 2)) == [(0, 2), (2, 4), (4, 5), (7, 8)]
