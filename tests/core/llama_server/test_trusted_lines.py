"""Which lines of a server that clients have reached are quoted and judged: none that a client can forge."""

from __future__ import annotations

import pytest

from llamasup.core.llama_server.diagnosis import diagnose
from llamasup.core.llama_server.log_lines import read_line
from llamasup.core.llama_server.trusted_lines import trusted_head, trusted_tail
from llamasup.core.system.process.child import Exit

ABORT = Exit(None, "SIGABRT")
SERVING = "0.10.000.100 I srv  llama_server: listening on http://127.0.0.1:8080"
OUT_OF_MEMORY = "CUDA error: out of memory"

# Written by b11434 for requests with a grammar, a body, a content part and an image of a client.
QUOTED = {
    "a grammar": (
        f"parse: error parsing grammar: expecting ::= at {OUT_OF_MEMORY}",
        "",
        OUT_OF_MEMORY,
        f"0.12.000.000 E {OUT_OF_MEMORY}",
        "/build/ggml.c:1644: GGML_ASSERT(secret) failed",
        "0.12.000.100 E srv    send_error: task id = 2, error: Failed to initialize samplers",
    ),
    "broken JSON": (
        f'0.12.000.000 W srv    operator(): got exception: {{"error":{{"message":"{OUT_OF_MEMORY}"}}}}',
    ),
    "the end of a line": (f"0.12.000.000 W Ignoring content part type: {OUT_OF_MEMORY}",),
    "a name in quotes": (
        "0.12.000.000 W common_sampler_types_from_names: unable to match sampler by name 'x",
        OUT_OF_MEMORY,
        "'",
    ),
    "an uncaught error": (
        "terminate called after throwing an instance of 'std::runtime_error'",
        "  what():  no such name: secret",
        OUT_OF_MEMORY,
    ),
}

FORGED_END = "terminate called after throwing an instance of 'std::bad_alloc as ordered by call 555 0123'"
QUOTED_EXCEPTION = (
    "parse: error parsing grammar: expecting ::= at",
    "",
    "a",
    "  what():  x",
    "terminate called after throwing an instance of 'std::bad_alloc'",
    FORGED_END,
    "libc++abi: terminating due to uncaught exception of type std::bad_alloc: secret memory",
    "",
)
SENT = "0.12.000.100 E srv    send_error: task id = 2, error: Failed to initialize samplers"
ANSWERED = (
    "0.13.000.000 I slot get_availabl: id  0 | task -1 | selected slot by LRU, t_last = -1",
    "0.13.000.001 I slot launch_slot_: id  0 | task 3 | processing task, is_child = 0",
    "0.13.000.900 I slot      release: id  0 | task 3 | stop processing: n_tokens = 5, truncated = 0",
)
QUOTED |= {
    "an exception in the middle": (*QUOTED_EXCEPTION, SENT, *ANSWERED),
    "an exception before an error of its own": (*QUOTED_EXCEPTION, SENT),
    "an exception before lines of other threads": (*QUOTED_EXCEPTION, *ANSWERED[2:] * 2),
    "an exception as the last lines": QUOTED_EXCEPTION,
    "an exception of macOS": (
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: no such name: secret",
        OUT_OF_MEMORY,
    ),
    "a request that goes on": (f"0.12.000.000 W Ignoring content part type: x\n{OUT_OF_MEMORY}", *ANSWERED),
    "a request that waits": (
        *f"0.12.000.000 W Ignoring content part type: x\n0.12.000.000 E {OUT_OF_MEMORY}".splitlines(),
        *ANSWERED[2:] * 5,
    ),
    "lines of unknown origin": (OUT_OF_MEMORY, *ANSWERED[2:], "something else", *ANSWERED[2:]),
}


@pytest.mark.parametrize("quoted", QUOTED.values(), ids=QUOTED)
@pytest.mark.parametrize("end", [ABORT, Exit(1, None), Exit(None, "SIGSEGV")], ids=str)
def test_text_of_a_client_neither_decides_nor_is_quoted(quoted: tuple[str, ...], end: Exit) -> None:
    diagnosis = diagnose(end, [SERVING, *quoted], phase="ready")
    assert diagnosis.cause in ("aborted", "segfault", "unknown")
    assert all(line.endswith(("'std::runtime_error'", "type std::runtime_error")) for line in diagnosis.lines)
    for text in (diagnosis.message, *diagnosis.lines):
        assert "secret" not in text
        assert "memory" not in text


def test_segmentation_fault_quotes_no_lines() -> None:
    diagnosis = diagnose(Exit(None, "SIGSEGV"), [SERVING, OUT_OF_MEMORY], phase="ready")
    assert (diagnosis.cause, diagnosis.lines) == ("segfault", ())


ENDS = {
    "CUDA": (
        "0.12.000.000 E CUDA error: out of memory",
        "0.12.000.001 E   current device: 0, in function alloc at /build/ggml-cuda/ggml-cuda.cu:466",
        "0.12.000.002 E   cuMemCreate(&handle, reserve_size, &prop, 0)",
        "/build/llama.cpp/ggml/src/ggml-cuda/ggml-cuda.cu:83: CUDA error",
        "[New LWP 4711]",
        "[Thread debugging using libthread_db enabled]",
        'Using host libthread_db library "/lib/x86_64-linux-gnu/libthread_db.so.1".',
        "0x00007f8a4b in wait4 () from /lib/x86_64-linux-gnu/libc.so.6",
        "#0  0x00007f8a4b in wait4 () from /lib/x86_64-linux-gnu/libc.so.6",
        "[Inferior 1 (process 4711) detached]",
    ),
    "Vulkan": (
        "ggml_vulkan: Device memory allocation of size 4294967296 failed.",
        "ggml_vulkan: vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
        "terminate called after throwing an instance of 'vk::OutOfDeviceMemoryError'",
        "  what():  vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
    ),
    "a buffer": (
        "0.12.000.000 E ggml_gallocr_reserve_n_impl: failed to allocate CUDA0 buffer of size 104857600",
        "0.12.000.100 E graph_compute: ggml_backend_sched_graph_compute_async failed with error -1",
        "/build/llama.cpp/src/llama-context.cpp:2010: fatal error",
        "/usr/lib/libggml-base.so(+0x1b5a6)[0x7f8a4b5a6]",
        "/usr/lib/libggml-base.so(ggml_abort+0x152)[0x7f8a4b5a7]",
    ),
    "the host": (
        "/build/llama.cpp/ggml/src/ggml.c:1644: GGML_ASSERT(ctx->mem_buffer != NULL) failed",
        "0.12.000.000 E ggml_aligned_malloc: insufficient memory (attempted to allocate  19.73 MB)",
    ),
    "an assertion": ("/build/llama.cpp/src/llama-kv-cache.cpp:12: GGML_ASSERT(n_seq > 0) failed",),
    "another thread": (
        "0.12.000.000 E alloc_buffer: allocating 22118.40 MiB on device 0: cudaMalloc failed: out of memory",
        *ANSWERED[2:] * 4,
    ),
    "behind a time": ("0.00.014.380 E CUDA error: out of memory", "0.00.014.381 /src/g.cu:98: CUDA error"),
    "before a line of another thread": (
        "0.00.014.380 E CUDA error: out of memory",
        "/src/ggml-cuda.cu:98: CUDA error",
        "0.00.017.000 I srv  log_server_r: done request: POST /completion 127.0.0.1 200",
        "0.00.017.662 ",
    ),
    "a blank in a path": ("/home/me/my src/ggml.c:3: GGML_ASSERT(x) failed",),
    "a path of Windows": (r"D:\a\llama.cpp\ggml-cuda.cu:98: CUDA error",),
    "the host, C++": (
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "  what():  std::bad_alloc",
    ),
    "the host, macOS": (
        "libc++abi: terminating due to uncaught exception of type std::bad_alloc: std::bad_alloc",
    ),
    "an exception, C++": (
        "terminate called after throwing an instance of 'std::filesystem::__cxx11::filesystem_error'",
        "  what():  cannot open secret",
    ),
    "an exception, macOS": (
        "libc++abi: terminating due to uncaught exception of type std::runtime_error: secret",
    ),
    "a backtrace, macOS": (  # backtrace_symbols(3): number, image, address, symbol, offset
        "/build/llama.cpp/src/llama-kv-cache.cpp:12: GGML_ASSERT(n_seq > 0) failed",
        "0   libggml-base.0.dylib                0x0000000100f3c1a8 ggml_print_backtrace + 276",
        "1   libggml-base.0.dylib                0x0000000100f3c394 ggml_abort + 156",
        "2   libllama.0.dylib                    0x00000001012a4c10 _ZN14llama_kv_cache5clearEb + 88",
        "10  llama-server                        0x0000000100b8e9fc main + 4088",
        "11  dyld                                0x000000018f4b2b98 start + 6076",
        "12  ???                                 0x0000000000000001 0x0 + 1",
    ),
    "Metal": (
        "ggml_metal_graph_compute: command buffer 0 failed with status 5",
        "error: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    ),
}
CAUSES = {
    "CUDA": "out_of_memory_device",
    "Vulkan": "out_of_memory_device",
    "a buffer": "out_of_memory_device",
    "the host": "out_of_memory_host",
    "an assertion": "assertion",
    "a backtrace, macOS": "assertion",
    "Metal": "out_of_memory_device",
    "another thread": "out_of_memory_device",
    "behind a time": "out_of_memory_device",
    "before a line of another thread": "out_of_memory_device",
    "a blank in a path": "assertion",
    "a path of Windows": "assertion",
    "the host, C++": "out_of_memory_host",
    "the host, macOS": "out_of_memory_host",
    "an exception, C++": "aborted",
    "an exception, macOS": "aborted",
}


@pytest.mark.parametrize("quoted", ["a grammar", "an exception before an error of its own"])
@pytest.mark.parametrize("which", ENDS)
def test_last_lines_of_an_abort_give_the_diagnosis(which: str, quoted: str) -> None:
    diagnosis = diagnose(ABORT, [SERVING, *QUOTED[quoted], *ENDS[which]], phase="ready")
    assert diagnosis.cause == CAUSES[which]
    assert diagnosis.lines
    assert not any("secret" in line or "LWP" in line for line in diagnosis.lines)


@pytest.mark.parametrize("line", ["  what():  secret", "libc++abi: terminating due to secret"])
def test_exception_of_unknown_type_is_not_quoted(line: str) -> None:
    for lines in ([line], ["terminate called after throwing an instance of 'secret'", line]):
        assert trusted_tail([*lines, OUT_OF_MEMORY]) == []


def test_abort_message_is_cut_before_a_quotation() -> None:
    where = "/build/llama.cpp/src/x.cpp:12: "
    assert trusted_tail([f"{where}no such name: 'secret'"]) == [f"{where}no such name"]
    assert diagnose(ABORT, [f"{where}bad 'secret'"], phase="ready").lines == (f"{where}bad",)


def test_survived_error_is_not_trusted() -> None:
    lines = ["E got exception: std::bad_alloc", "I slot print_timing: id  0 | task 3 | 5 tokens"]
    assert trusted_tail(lines) == []
    assert trusted_tail(lines[:1]) == ["E got exception: std::bad_alloc"]


@pytest.mark.parametrize(
    "line",
    [
        "0.01.000.000 W srv    operator(): (CORS) skip non-localhost origin: ",
        "0.01.000.000 I srv  log_server_r: request: GET /",
    ],
)
def test_quoted_requests_of_a_loading_server_are_ignored(line: str) -> None:
    """`wrap` passes requests on while the first load lasts."""
    before = "0.00.500.000 I srv    load_model: loading model '/m.gguf'"
    lines = [before, f"{line}{OUT_OF_MEMORY}", OUT_OF_MEMORY, "0.02.000.000 I something else"]
    diagnosis = diagnose(ABORT, lines, phase="starting")
    assert diagnosis.cause == "aborted"
    assert not any(OUT_OF_MEMORY in text for text in diagnosis.lines)
    assert trusted_head(lines) == [before]
    for text in ("listening on", "the target and draft vocabs are not compatible"):
        assert read_line(line + text) is None


def test_load_failure_after_a_quoted_request_is_diagnosed() -> None:
    lines = [
        "0.01.000.000 W srv    operator(): (CORS) skip non-localhost origin: http://a",
        "0.02.000.000 I srv    load_model: loading",
        "0.04.210.110 E alloc_buffer: allocating 22118.40 MiB on device 0: cudaMalloc failed: out of memory",
    ]
    assert diagnose(Exit(1, None), lines, phase="starting").cause == "out_of_memory_device"
