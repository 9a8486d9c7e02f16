// A llamasup that lives as long as this process: `ready` has its address, `stop()` ends it.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { Readable } from "node:stream";

const STOP_TIMEOUT_MS = 45_000;

export function startLlamasup(command, model) {
  const [program, ...words] = command;
  // Its standard input is a pipe: the end of the pipe, also by our death, is what stops llamasup.
  const child = spawn(program, [...words, "run", model, "--sidecar"], { stdio: ["pipe", "pipe", "inherit"] });
  child.stdin.on("error", () => {}); // it has ended before us
  const ended = new Promise((resolve) => {
    child.once("close", (code, signal) => resolve(code ?? signal));
    child.once("error", (error) => resolve(error.message)); // it could not be started
  });
  const ready = new Promise((resolve, reject) => {
    ended.then((how) => reject(new Error(`llamasup ended with ${how}`)));
    createInterface({ input: child.stdout }).on("line", (line) => {
      const event = JSON.parse(line); // there are other events, which an application may show
      if (event.event === "ready") resolve(event);
    });
  });
  const stop = () => {
    child.stdin.end();
    const patience = setTimeout(() => child.kill("SIGKILL"), STOP_TIMEOUT_MS);
    return ended.finally(() => clearTimeout(patience));
  };
  return { ready, ended, stop };
}

// The pieces of text of a streamed answer.
export async function* chat(url, messages) {
  const body = JSON.stringify({ messages, stream: true, max_tokens: 128 });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  for await (const line of createInterface({ input: Readable.fromWeb(answer.body) })) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice("data: ".length));
    if (event.error) throw new Error(event.error.message); // llama-server ended within the answer
    const text = event.choices?.[0]?.delta?.content;
    if (text) yield text;
  }
}
