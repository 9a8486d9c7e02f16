// A llamasup that lives as long as this process: `ready` has its address, `stop()` ends it.
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";

const STOP_TIMEOUT_MS = 45_000, LENGTH_OF_REASON = 2000;

export function startLlamasup(program, model) {
  // llamasup stops when its standard input ends, also if this process is killed. On Windows, it has no console.
  const child = spawn(program, ["run", model, "--sidecar"], { stdio: "pipe", windowsHide: true });
  let said = "";
  child.stderr.setEncoding("utf8").on("data", (text) => (said = (said + text).slice(-LENGTH_OF_REASON)));
  child.stdin.on("error", () => {}); // llamasup has already ended
  const ended = new Promise((resolve) => {
    child.once("close", (code, signal) => resolve(`llamasup ended with ${code ?? signal}\n${said}`));
    child.once("error", (error) => resolve(`${program} could not be started: ${error.message}`));
  });
  const ready = new Promise((resolve, reject) => {
    ended.then((reason) => reject(new Error(reason)));
    createInterface({ input: child.stdout }).on("line", (line) => {
      const event = parsed(line); // there are other events, which an application may show
      if (event?.event === "ready") resolve(event);
    });
  });
  ready.catch(() => {}); // also if no question waits for it
  const stop = () => {
    child.stdin.end();
    const patience = setTimeout(() => {
      child.kill("SIGKILL");
      for (const output of [child.stdout, child.stderr]) output.destroy();
    }, STOP_TIMEOUT_MS);
    return ended.finally(() => clearTimeout(patience));
  };
  return { ready, ended, stop };
}

// The last line of a program that was killed may be incomplete.
function parsed(line) {
  try {
    return JSON.parse(line);
  } catch {
    return undefined;
  }
}
