"""Let a library answer a question with tools, with its own packages: ``library.py NAME MODEL QUESTION``."""

import json
import sys
from typing import Any

from tools import read_file, run_command, write_file  # type: ignore[import-not-found,unused-ignore]

TOOLS = (read_file, write_file, run_command)


def langchain(model: str, question: str) -> str:
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    tools = {function.__name__: tool(function) for function in TOOLS}
    bound = ChatOpenAI(model=model).bind_tools(list(tools.values()))
    messages: list[Any] = [HumanMessage(question)]
    while (answer := bound.invoke(messages)).tool_calls:
        messages.append(answer)
        for call in answer.tool_calls:
            result = tools[call["name"]].invoke(call["args"])
            messages.append(ToolMessage(str(result), tool_call_id=str(call["id"])))
    return str(answer.text)


def litellm(model: str, question: str) -> str:
    from litellm import completion

    tools = [
        {
            "type": "function",
            "function": {
                "name": function.__name__,
                "description": function.__doc__,
                "parameters": {
                    "type": "object",
                    "properties": {
                        name: {"type": "string"} for name in function.__annotations__ if name != "return"
                    },
                },
            },
        }
        for function in TOOLS
    ]  # fmt: skip
    functions: dict[str, Any] = {function.__name__: function for function in TOOLS}
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        answer: Any = completion(model=f"openai/{model}", messages=messages, tools=tools)
        message = answer.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = functions[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def pydantic_ai(model: str, question: str) -> str:
    from pydantic_ai import Agent  # type: ignore[import-not-found,unused-ignore]

    agent = Agent(f"openai-chat:{model}", tools=list(TOOLS))
    return str(agent.run_sync(question).output)


if __name__ == "__main__":
    called = {"langchain": langchain, "litellm": litellm, "pydantic-ai": pydantic_ai}[sys.argv[1]]
    print(called(*sys.argv[2:]))
