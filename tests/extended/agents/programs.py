"""The agents and libraries that are run: their versions, their commands, and the script of the model."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from tests.kit.scripted import Call

__all__ = ["ANSWER", "DONE", "OPEN_WEBUI", "PROGRAMS", "TASK", "Program"]

TASK = "Read notes.txt, write its answer into answer.txt, and the length of answer.txt into count.txt."
NOTES = "The question is 6 x 7.\n"
ANSWER = "The answer is 42.\n"
DONE = "All of it is done, as you wished."
_PATCH = f"*** Begin Patch\n*** Add File: answer.txt\n+{ANSWER}*** End Patch\n"
_COUNT = "wc -c < answer.txt > count.txt"

Registry = Literal["npm", "PyPI"]


class Program(Struct, frozen=True):
    """A program, as a row of a table. In its texts, {folder}, {model}, {task} and {url} are replaced.

    ``client`` is its name for ``llamasup connect``. ``setup`` is run after connect if that writes no file.
    ``calls`` are the tool calls of the model. A program without calls gets ``text``.
    """

    name: str
    title: str
    registry: Registry
    package: str
    version: str
    hash: str
    client: str
    command: tuple[str, ...]
    calls: tuple[Call, ...] = ()
    text: str = DONE
    setup: tuple[str, ...] = ()
    setup_by: str = ""  # what setup is, for the table of the docs
    environment: dict[str, str] = {}
    path: str = "/v1/chat/completions"
    is_agent: bool = True  # its requests are its own: they are recorded
    counts: bool = True  # it can run a command
    gives_up: bool = True  # it ends if its prompt does not fit into the context


def _calls(read: Call, write: Call, run: Call) -> tuple[Call, ...]:
    return (read, write, run)


_LIBRARY = tuple(
    _calls(
        Call("read_file", {"path": "{folder}/notes.txt"}),
        Call("write_file", {"path": "{folder}/answer.txt", "content": ANSWER}),
        Call("run_command", {"command": _COUNT}),
    )
)


def _library(name: str, title: str, package: str, version: str, sha256: str) -> Program:
    """Return the row of a library, which ``library.py`` calls with three tools."""
    return Program(
        name, title, "PyPI", package, version, sha256, "openai",
        ("python", "{here}/library.py", name, "{model}", "{task}"), _LIBRARY, is_agent=False,
    )  # fmt: skip


PROGRAMS = (
    Program(
        *("claude-code", "Claude Code", "npm", "@anthropic-ai/claude-code", "2.1.197"),
        "sha512-EqrwbRcI7M5y8jQlayIfTMmbZJ2OQaLOc7KwIWKdryQCdKWUEFr+C9rMovZUuj2Asndi7aqLujEzRtr471gncg==",
        "claude-code",
        ("claude", "-p", "{task}", "--dangerously-skip-permissions"),
        _calls(
            Call("Read", {"file_path": "{folder}/notes.txt"}),
            Call("Write", {"file_path": "{folder}/answer.txt", "content": ANSWER}),
            Call("Bash", {"command": _COUNT}),
        ),
        path="/v1/messages",
        environment={
            "IS_SANDBOX": "1",  # else it refuses to skip its permissions as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
    ),
    Program(
        *("codex", "Codex", "npm", "@openai/codex", "0.171.0"),
        "sha512-1IOFzL2Xg86tLdw6kDo3GoKbkQENgQi7TI6rlEvN132R7ngSw7SNOIQoTcnKzSZZ8kf9N9GynCweSoaFbqk2Eg==",
        "codex",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{task}"),
        _calls(
            Call("exec_command", {"cmd": "cat notes.txt"}),
            Call("apply_patch", {"input": _PATCH}),
            Call("exec_command", {"cmd": _COUNT}),
        ),
        path="/v1/responses",
    ),
    Program(
        *("opencode", "opencode", "npm", "opencode-ai", "1.18.33"),
        "sha512-58P1ffLRXiAY4QeoABqUjqf6DEzm1ihpovvn9Ad+oOLbLiwK/rf88wruT9IATJ7AtNjmi8iA7pC8tN4o5y799Q==",
        "opencode",
        ("opencode", "run", "{task}"),
        _calls(
            Call("read", {"filePath": "{folder}/notes.txt"}),
            Call("write", {"content": ANSWER, "filePath": "{folder}/answer.txt"}),
            Call("bash", {"command": _COUNT}),
        ),
        gives_up=False,  # it summarises the conversation, which is not what is too long, and tries again
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    Program(
        *("continue", "Continue CLI", "npm", "@continuedev/cli", "1.5.47"),
        "sha512-gtpewV3RoIOD9dyTtKIBi1SY0VOHRu3Ehe7C/mmnswm+j34MPyrcQhQaWj/m+jdfGO4fNIKdrgGIlLso1ULDFw==",
        "continue",
        ("cn", "-p", "{task}", "--auto"),
        _calls(
            Call("Read", {"filepath": "{folder}/notes.txt"}),
            Call("Write", {"filepath": "{folder}/answer.txt", "content": ANSWER}),
            Call("Bash", {"command": _COUNT}),
        ),
        environment={"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_AUTO_UPDATED": "1"},
    ),
    Program(
        *("cline", "Cline CLI", "npm", "cline", "3.0.65"),
        "sha512-6P2jgsJHp+JRUzlGR6Rp4W/zAwXPg8ihC2M9ec/VgKS4nnlGCB8Ftn17StcIjYFYtocJRkU8UGUnKF69zhv40Q==",
        "cline",
        ("cline", "{task}", "--cwd", "{folder}"),
        _calls(
            Call("read_files", {"files": [{"path": "{folder}/notes.txt"}]}),
            Call("editor", {"path": "{folder}/answer.txt", "new_text": ANSWER}),
            Call("run_commands", {"commands": [_COUNT]}),
        ),
        setup_by="`cline auth`",
        setup=("cline", "auth", "openai", "-k", "none", "-m", "{model}", "-b", "{url}/v1"),
        environment={"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"},
    ),
    Program(
        *("aider", "aider", "PyPI", "aider-chat", "0.86.2"),
        "64f6a0c66c9f4633ad9f479bca3e64ebcba02b9da03c6b604b74a44736b2416e",
        "aider",
        ("aider", "--message", "{task}", "--yes-always", "--no-git", "--no-analytics", "--no-check-update",
         "--edit-format", "diff", "notes.txt"),
        text=f"{DONE}\n\nanswer.txt\n```\n<<<<<<< SEARCH\n=======\n{ANSWER}>>>>>>> REPLACE\n```\n",
        counts=False,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Program(
        *("llm", "llm", "PyPI", "llm", "0.36"),
        "801263d046854d15e3f45ee8da5024c23c313d129f67c7c93961649c531bb050",
        "openai",
        ("llm", "--functions", "{here}/tools.py", "-m", "{model}", "{task}"),
        _LIBRARY,
        setup_by="`extra-openai-models.yaml`",
        setup=(
            *("sh", "-c", 'cd && mkdir llm && printf "%s" "$0" > llm/extra-openai-models.yaml'),
            "- model_id: {model}\n  model_name: {model}\n  api_base: {url}/v1\n  supports_tools: true\n",
        ),
        environment={"LLM_USER_PATH": "{home}/llm"},
        is_agent=False,
    ),
    _library("langchain", "LangChain (`langchain-openai`)", "langchain-openai", "1.7.4",
             "aaee93369765bac7ebf640aab62f8ae16df403ed982737ae51f88f6a24a151ab"),
    _library("litellm", "LiteLLM", "litellm", "1.110.2",
             "9d94d1c7d524b6fd10c14f9c8c6c4f0ac31705f9964ac59dcfd8337c046d8917"),
    _library("pydantic-ai", "Pydantic AI", "pydantic-ai-slim[openai]", "2.68.0",
        "bb2fe81f198b77da7686f7b78c78c8a8ce966807c77d9ae277950fc20b77b165"),
)  # fmt: skip

OPEN_WEBUI = Program(
    *("open-webui", "Open WebUI", "PyPI", "open-webui", "0.12.4"),
    "02e9caba96234db3fa17a92e56163b3f7f2b8ca8227fa886b85c178d696483f6",
    "open-webui",
    ("open-webui", "serve", "--host", "127.0.0.1", "--port"),
    environment={
        "DEFAULT_MODELS": "open-webui",  # of those that llamasup serves here
        "OFFLINE_MODE": "true",
        "RAG_EMBEDDING_ENGINE": "openai",
        "WEBUI_SECRET_KEY": "secret",
    },
    is_agent=False,
)
"""Is used in a browser. It is installed without PyTorch (3 GB), with which it would embed documents."""
