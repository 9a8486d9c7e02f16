// As much of Electron as the main process, the preload script and the page of examples/electron use.
//
// The window asks the questions in $ASK, a JSON list, one after the other. It prints `text` at the first piece
// of an answer, prints what the page shows, and is closed. Without $ASK it stays open.
import { EventEmitter } from "node:events";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout } from "node:timers/promises";
import { runInThisContext } from "node:vm";

const handlers = {};
const renderer = new EventEmitter(); // what the page receives
let pieces = 0;

class App extends EventEmitter {
  isPackaged = false;
  whenReady = async () => {};
  quit() {
    let isPrevented = false;
    this.emit("before-quit", { preventDefault: () => (isPrevented = true) });
    if (!isPrevented) process.exit();
  }
}
export const app = new App();
export const dialog = { showErrorBox: (title, text) => console.error(`${title}: ${text}`) };
export const ipcMain = { handle: (name, handler) => (handlers[name] = handler) };

const sender = {
  send: (channel, ...values) => {
    if (pieces++ === 0) console.log("text");
    renderer.emit(channel, {}, ...values);
  },
};
globalThis.electronOfPreload = {
  contextBridge: { exposeInMainWorld: (name, api) => (globalThis[name] = api) },
  ipcRenderer: {
    invoke: (channel, ...values) => handlers[channel]({ sender }, ...values),
    on: (channel, listener) => renderer.on(channel, listener),
  },
};

export class BrowserWindow {
  webContents = Object.assign(new EventEmitter(), { setWindowOpenHandler: (handler) => (this.opens = handler) });

  constructor({ webPreferences }) {
    createRequire(import.meta.url)(webPreferences.preload);
  }

  async loadFile(name) {
    const html = readFileSync(name, "utf8");
    const elements = {};
    globalThis.document = {
      getElementById: (id) => {
        if (!html.includes(`id="${id}"`)) throw new Error(`${name} has no ${id}`);
        return (elements[id] ??= Object.assign(new EventTarget(), { textContent: "", value: "", disabled: false }));
      },
    };
    for (const [, script] of html.matchAll(/<script src="(.*)">/g)) runInThisContext(readFileSync(script, "utf8"));
    if (process.env.ASK === undefined) return;
    for (const asked of JSON.parse(process.env.ASK)) {
      elements.question.value = asked;
      elements.form.dispatchEvent(new Event("submit"));
      while (elements.ask.disabled) await setTimeout(5);
    }
    const event = new Event("navigation", { cancelable: true });
    this.webContents.emit("will-navigate", event);
    const isClosed = event.defaultPrevented && this.opens({ url: "https://example.org" }).action === "deny";
    console.log(JSON.stringify({ shown: elements.answer.textContent, pieces, isClosed }));
    app.emit("window-all-closed");
    app.quit(); // again, while llamasup stops
  }
}
