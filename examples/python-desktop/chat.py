"""The pieces of text of a streamed answer."""

import json
from collections.abc import Iterator
from http.client import HTTPConnection


def chat(address: dict, messages: list[dict]) -> Iterator[str]:
    connection = HTTPConnection(address["host"], address["port"])
    body = json.dumps({"messages": messages, "stream": True, "max_tokens": 128})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(json.load(answer)["error"]["message"])
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:  # llama-server ended within the answer
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice["delta"].get("content") or ""
