// Runs a model beside a Node program: starts llamasup, asks once, stops it.
//
//     node parent.mjs [MODEL]

import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";

const START_TIMEOUT_MS = 120_000, REQUEST_TIMEOUT_MS = 60_000, STOP_TIMEOUT_MS = 45_000;

const model = process.argv[2] ?? "demo";
const program = process.env.LLAMASUP ?? "llamasup";

const llamasup = spawn(program, ["run", model, "--sidecar"], {
  // llamasup stops when its standard input ends, also if this process is killed. Its standard output has the
  // events, and its messages go to our standard error.
  stdio: ["pipe", "pipe", "inherit"],
  windowsHide: true,
});
llamasup.stdin.on("error", () => {}); // llamasup has already ended
const ended = new Promise((resolve) => {
  llamasup.once("close", (code, signal) => resolve(code ?? signal));
  llamasup.once("error", (error) => resolve(error.message)); // it could not be started
});

function untilReady() {
  return new Promise((resolve, reject) => {
    setTimeout(() => reject(new Error("llamasup was not ready in time")), START_TIMEOUT_MS).unref();
    ended.then((how) => reject(new Error(`llamasup ended with ${how} (see its messages above)`)));
    // Goes on reading after that, so that llamasup can go on writing.
    createInterface({ input: llamasup.stdout }).on("line", (line) => {
      if (isReady(line)) resolve(JSON.parse(line));
    });
  });
}

function isReady(line) {
  try {
    return JSON.parse(line).event === "ready";
  } catch {
    return false; // the last line of a program that was killed may be incomplete
  }
}

async function ask(url, prompt) {
  const response = await fetch(`${url}/completion`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ prompt, n_predict: 16 }),
    signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
  });
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return (await response.json()).content;
}

try {
  const ready = await untilReady();
  console.log(await ask(ready.url, "Once upon a time"));
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  llamasup.stdin.end(); // ask it to stop
  const patience = setTimeout(() => llamasup.kill("SIGKILL"), STOP_TIMEOUT_MS);
  const how = await ended; // what it has started has gone with it
  clearTimeout(patience);
  process.exitCode ||= how === 0 ? 0 : 1;
}
