"""Turns the tools of a request to ``/v1/responses`` into function tools (pure).

llama-server (b11434, ``server_chat_convert_responses_to_chatcmpl``) skips each tool that is no function,
refuses the calls of custom tools in ``input``, and ignores a ``namespace`` and a ``tool_choice`` that names a
tool. Codex sends each MCP server as one ``namespace``, and ``apply_patch`` as a ``custom`` tool.
"""

from __future__ import annotations

import re
import zlib
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from llamasup.core.http.requested_model import plain_json

__all__ = ["INPUT", "INSTRUCT", "Names", "Rewritten", "Tool", "flat_name", "rewritten"]

INPUT: Final = "input"
"""The only argument of the function that stands for a custom tool."""
MAX_NAME: Final = 64
"""The most letters of the name of a function in OpenAI's API, which templates and grammars expect."""
_MOST: Final = ((b'"type"', 20_000), (b":", 200_000), (b",", 500_000))
"""A body with more of these would hold the event loop for longer than about 0.2 s."""
_LIGHT: Final = 100_000  # bytes, which cannot have that many
_MOST_NAMED: Final = 8  # types in the header
_OTHER_LETTERS: Final = re.compile(r"[^A-Za-z0-9_-]")
INSTRUCT: Final = ("system", "developer")  # b11434 makes a system message of both, but for gpt-oss
_is_type: Final = re.compile(r"[a-z][a-z0-9_]{0,39}").fullmatch

Fields = dict[str, Raw]
read_fields: Final = msgspec.json.Decoder(Fields).decode
read_items: Final = msgspec.json.Decoder(list[Raw]).decode
encode: Final = msgspec.json.Encoder().encode
UNREADABLE: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_decode: Final = msgspec.json.Decoder().decode
_PREFACE: Final = "Put the complete input of this tool, as plain text, into the string `input`."


class Tool(Struct, frozen=True):
    """A tool as the client declared it. ``namespace`` is empty for a tool outside all namespaces."""

    name: str
    namespace: str = ""
    is_custom: bool = False


Names = dict[str, Tool]
"""The tools that became functions, by the name of their function."""


class Rewritten(Struct, frozen=True):
    """A request for llama-server. ``body`` is None if the request needs no change. ``ignored``: the types of
    its tools that llama-server skips.
    """

    body: bytes | None = None
    names: Names = {}
    ignored: tuple[str, ...] = ()


UNCHANGED: Final = Rewritten()


def rewritten(body: bytes) -> Rewritten:
    """Return the request with functions in place of other tools. llama-server judges an unreadable body.

    What does not change stays byte for byte.
    """
    if is_heavy(body):
        return UNCHANGED
    try:
        return _Request(read_fields(plain_json(body))).rewritten()
    except UNREADABLE:
        return UNCHANGED


def is_heavy(body: bytes) -> bool:
    """Return whether changing this body would hold the event loop for too long."""
    return len(body) > _LIGHT and any(body.count(mark) > most for mark, most in _MOST)


def flat_name(tool: Tool) -> str:
    """Return the name of the function for a tool, if no other tool has it: at most 64 plain letters.

    A name that had to be changed gets a checksum, so that it stays unambiguous, and the same in each request.
    """
    whole = tool.name
    if tool.namespace:
        whole = f"{tool.namespace.removesuffix('__')}__{tool.name}"
    plain = _OTHER_LETTERS.sub("_", whole)
    return plain if plain == whole and len(plain) <= MAX_NAME else _marked(plain, tool)


def _marked(plain: str, tool: Tool, round_: int = 0) -> str:
    identity = f"{round_}\0{tool.namespace}\0{tool.name}".encode("utf-8", "replace")
    return f"{plain[: MAX_NAME - 9]}_{zlib.crc32(identity):08x}"


class _Request:
    """The members of a request, which are changed in place."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        self._names: Names = {}
        self._flat: dict[Tool, str] = {}
        self._ignored: dict[str, None] = {}
        self._taken: set[str] = set()

    def rewritten(self) -> Rewritten:
        changed = self._change_tools()
        changed = self._change_input() or changed
        changed = self._merge_instructions() or changed
        body = encode(self._fields) if changed else None
        return Rewritten(body, self._names, tuple(self._ignored)[:_MOST_NAMED])

    # --- tools

    def _change_tools(self) -> bool:
        if not begins(self._fields.get("tools"), b"["):
            return False
        raw_tools = read_items(self._fields["tools"])
        tools = [read_fields(raw) if begins(raw, b"{") else {} for raw in raw_tools]
        types = [text(tool.get("type")) for tool in tools]
        self._taken = {
            text(tool.get("name")) for tool, type_ in zip(tools, types, strict=True) if type_ == "function"
        }
        functions: list[Raw] = []
        for raw, tool, type_ in zip(raw_tools, tools, types, strict=True):
            if type_ == "namespace" and text(tool.get("name")) and begins(tool.get("tools"), b"["):
                functions += self._of_namespace(tool)
            elif type_ == "custom" and text(tool.get("name")):
                functions += self._function(tool, "", is_custom=True)
            else:
                if type_ != "function":
                    self._ignore(type_)
                functions.append(raw)
        if not self._names:
            return False
        self._fields["tools"] = raw_of(self._chosen(functions))
        return True

    def _of_namespace(self, namespace: Fields) -> list[Raw]:
        functions: list[Raw] = []
        for raw in read_items(namespace["tools"]):
            tool = read_fields(raw) if begins(raw, b"{") else {}
            type_ = text(tool.get("type"))
            if type_ in ("function", "custom") and text(tool.get("name")):
                functions += self._function(tool, text(namespace["name"]), is_custom=type_ == "custom")
            else:
                self._ignore(type_)
        return functions

    def _function(self, fields: Fields, namespace: str, *, is_custom: bool) -> tuple[Raw, ...]:
        """The function for a tool; none if the same tool came before."""
        tool = Tool(text(fields["name"]), namespace, is_custom)
        if tool in self._flat:
            return ()
        name, round_ = flat_name(tool), 0
        while name in self._taken:
            name, round_ = _marked(name, tool, round_), round_ + 1
        self._taken.add(name)
        self._names[name], self._flat[tool] = tool, name
        if is_custom:
            return (raw_of(_function_of_custom(name, fields)),)
        return (raw_of({**fields, "name": raw_of(name)}),)

    def _ignore(self, type_: str) -> None:
        self._ignored[type_ if _is_type(type_) else "other"] = None

    def _chosen(self, functions: list[Raw]) -> list[Raw]:
        """Keep only the tool that ``tool_choice`` names, and require it: llama-server has no such choice."""
        if not begins(self._fields.get("tool_choice"), b"{"):
            return functions
        choice = read_fields(self._fields["tool_choice"])
        name, namespace = text(choice.get("name")), text(choice.get("namespace"))
        found = [
            flat
            for flat, tool in self._names.items()
            if tool.name == name and (tool.namespace == namespace or not (namespace or name in self._taken))
        ]
        if len(found) != 1 or text(choice.get("type")) not in ("function", "custom"):
            return functions
        self._fields["tool_choice"] = raw_of("required")
        return [raw for raw in functions if text(read_fields(raw).get("name")) == found[0]]

    # --- the conversation

    def _change_input(self) -> bool:
        if not begins(self._fields.get("input"), b"["):
            return False
        items, changed = read_items(self._fields["input"]), False
        for number, raw in enumerate(items):
            if (item := self._changed_item(raw)) is not None:
                items[number] = raw_of(item)
                changed = True
        if changed:
            self._fields["input"] = raw_of(items)
        return changed

    def _changed_item(self, raw: Raw) -> Fields | None:
        as_bytes = bytes(raw)
        if b"tool_call" not in as_bytes and b'"namespace"' not in as_bytes:
            return None
        item = read_fields(raw) if begins(raw, b"{") else {}
        match text(item.get("type")):
            case "custom_tool_call_output":
                item["type"] = raw_of("function_call_output")
            case "custom_tool_call":
                item["type"] = raw_of("function_call")
                item["name"] = raw_of(self._name_of(item, is_custom=True))
                item["arguments"] = raw_of(encode({INPUT: text(item.pop("input", None))}).decode())
            case "function_call" if "namespace" in item:
                item["name"] = raw_of(self._name_of(item, is_custom=False))
            case _:
                return None
        item.pop("namespace", None)
        return item

    def _name_of(self, call: Fields, *, is_custom: bool) -> str:
        tool = Tool(text(call.get("name")), text(call.get("namespace")), is_custom)
        return self._flat.get(tool) or flat_name(tool)

    def _merge_instructions(self) -> bool:
        """Make one message of the instructions at the beginning, of which Codex sends several.

        Of the 71 templates that come with b11434, 6 refuse a second system message, such as that of Qwen3.5,
        and 13 drop one of the two without a word.
        """
        if not begins(self._fields.get("input"), b"["):
            return False
        items = read_items(self._fields["input"])
        instructions = text(self._fields.get("instructions"))
        texts = [instructions] if instructions else []
        count = 0
        for raw in items:
            message = read_fields(raw) if begins(raw, b"{") else {}
            found = text_of(message) if text(message.get("role")) in INSTRUCT else None
            if found is None:
                break
            texts.append(found)
            count += 1
        if len(texts) < 2:
            return False
        whole = "\n\n".join(filter(None, texts))
        if instructions:
            self._fields["instructions"] = raw_of(whole)
            self._fields["input"] = raw_of(items[count:])
        else:
            first = {**read_fields(items[0]), "content": raw_of(whole)}
            self._fields["input"] = raw_of([raw_of(first), *items[count:]])
        return True


def _function_of_custom(name: str, fields: Fields) -> dict[str, Any]:
    description = "\n\n".join(filter(None, (text(fields.get("description")), _PREFACE, _grammar_of(fields))))
    argument = {"type": "string", "description": "The complete input, as plain text."}
    parameters = {
        "type": "object",
        "properties": {INPUT: argument},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "name": name,
        "description": description,
        "strict": False,
        "parameters": parameters,
    }


def _grammar_of(fields: Fields) -> str:
    """The grammar of the input, which the model learns only from the description."""
    form = read_fields(fields["format"]) if begins(fields.get("format"), b"{") else {}
    definition = text(form.get("definition"))
    if text(form.get("type")) != "grammar" or not definition:
        return ""
    return f"The input matches this grammar ({text(form.get('syntax')) or 'lark'}):\n{definition}"


# --- JSON


def text(raw: Raw | None) -> str:
    """Return a string of JSON; of anything else an empty one."""
    if raw is None or not begins(raw, b'"'):
        return ""
    value: str = _decode(raw)
    return value


def text_of(message: Fields) -> str | None:
    """Return the text of a message; None if it has anything else."""
    content = message.get("content")
    if content is None or not begins(content, b"["):
        return text(content) if begins(content, b'"') else None
    parts = [read_fields(part) if begins(part, b"{") else {} for part in read_items(content)]
    if any(text(part.get("type")) not in ("input_text", "text") for part in parts):
        return None
    return "\n".join(text(part.get("text")) for part in parts)


def raw_of(value: Any) -> Raw:
    return Raw(encode(value))


def begins(raw: Raw | None, mark: bytes) -> bool:
    return raw is not None and memoryview(raw)[:1] == mark
