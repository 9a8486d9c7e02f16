"""A window that chats with a model. llamasup starts and ends with the application.

python main.py
"""

import os
import sys
import tkinter
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from chat import chat
from sidecar import Llamasup


class Window(tkinter.Tk):
    def __init__(self, llamasup: Llamasup) -> None:
        super().__init__()
        self.title("Chat")
        self.llamasup, self.messages = llamasup, []
        # Only this thread may use the window: what other threads want to show, they put here.
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.answer = tkinter.Text(self, name="answer", wrap="word")
        self.question = tkinter.Entry(self, name="question")
        self.button = tkinter.Button(self, name="ask", text="Ask", command=self.ask)
        self.question.bind("<Return>", lambda _event: self.button.invoke())
        for widget in (self.answer, self.question, self.button):
            widget.pack(fill="x")
        self.question.focus()
        llamasup.ended.add_done_callback(lambda ended: self.show(ended.result()))
        self.make_calls()

    def make_calls(self) -> None:
        while not self.calls.empty():
            self.calls.get()()
        self.after(20, self.make_calls)

    def show(self, text: str) -> None:
        self.calls.put(lambda: (self.answer.insert("end", text), self.answer.see("end")))

    def ask(self) -> None:
        question = self.question.get()
        self.question.delete(0, "end")
        self.button["state"] = "disabled"  # one answer at a time
        self.show(f"> {question}\n")
        messages = [*self.messages, {"role": "user", "content": question}]
        Thread(target=self.fetch_answer, args=[messages], daemon=True).start()

    def fetch_answer(self, messages: list[dict]) -> None:
        answer = ""
        try:
            for text in chat(self.llamasup.ready.result(), messages):
                self.show(text)
                answer += text
            self.messages = [*messages, {"role": "assistant", "content": answer}]
            self.show("\n")
        except Exception as error:
            self.show(f"{error}\n")
        self.calls.put(lambda: self.button.config(state="normal"))


def main() -> None:
    program = os.environ.get("LLAMASUP", "llamasup")
    if hasattr(sys, "frozen"):  # the folder of scripts/bundle lies next to the program
        program = str(Path(sys.executable).parent / "llamasup" / "llamasup")
        # What PyInstaller has put there is not for llama-server.
        os.environ["LD_LIBRARY_PATH"] = os.environ.get("LD_LIBRARY_PATH_ORIG", "")
    llamasup = Llamasup(program, os.environ.get("LLAMASUP_MODEL", "demo"))
    try:
        Window(llamasup).mainloop()
    finally:
        llamasup.stop()


if __name__ == "__main__":
    main()
