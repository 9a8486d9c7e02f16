"""Runs a model beside a Python program: starts llamasup, asks once, stops it.

python parent.py [MODEL]
"""

import json
import os
import subprocess
import sys
import threading
import urllib.request

START_TIMEOUT_S, REQUEST_TIMEOUT_S, STOP_TIMEOUT_S = 120, 60, 45


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else "demo"
    program = os.environ.get("LLAMASUP", "llamasup")
    llamasup = subprocess.Popen(
        [program, "run", model, "--sidecar"],
        stdin=subprocess.PIPE,  # llamasup stops when it ends, also if this process is killed
        stdout=subprocess.PIPE,  # events
        stderr=None,  # its messages go to our standard error
        encoding="utf-8",
        errors="replace",
    )
    try:
        ready = wait_until_ready(llamasup)
        print(ask(ready["url"], "Once upon a time"))
    finally:
        llamasup.stdin.close()  # ask it to stop
        try:
            llamasup.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            llamasup.kill()  # what it has started goes with it
            llamasup.wait()
    return llamasup.returncode


def wait_until_ready(llamasup: subprocess.Popen) -> dict:
    """The `ready` event. A thread goes on reading, so that llamasup can go on writing."""
    ready, received = {}, threading.Event()

    def read_events() -> None:
        try:
            for line in llamasup.stdout:
                if event := ready_event(line):
                    ready.update(event)
                    received.set()
        finally:
            received.set()  # llamasup has ended

    threading.Thread(target=read_events, daemon=True).start()
    if not received.wait(START_TIMEOUT_S):
        raise TimeoutError("llamasup was not ready in time")
    if not ready:
        raise RuntimeError(f"llamasup ended with {llamasup.wait(STOP_TIMEOUT_S)} (see its messages above)")
    return ready


def ready_event(line: str) -> dict | None:
    try:
        event = json.loads(line)  # there are other events
    except ValueError:  # the last line of a program that was killed may be incomplete
        return None
    return event if isinstance(event, dict) and event.get("event") == "ready" else None


def ask(url: str, prompt: str) -> str:
    body = json.dumps({"prompt": prompt, "n_predict": 16}).encode()
    request = urllib.request.Request(
        f"{url}/completion", data=body, headers={"Content-Type": "application/json"}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
    with direct.open(request, timeout=REQUEST_TIMEOUT_S) as response:
        return json.load(response)["content"]


if __name__ == "__main__":
    sys.exit(main())
