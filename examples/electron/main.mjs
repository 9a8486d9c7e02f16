// A window that chats with a model. llamasup starts and ends with the application.
import { join } from "node:path";
import { app, BrowserWindow, dialog, ipcMain } from "electron";
import { chat } from "./chat.mjs";
import { startLlamasup } from "./llamasup.mjs";

// In the packaged application, the folder of scripts/bundle lies in its resources (package.json).
const bundled = join(process.resourcesPath ?? "", "llamasup", "llamasup");
const program = app.isPackaged ? bundled : (process.env.LLAMASUP ?? "llamasup");
let llamasup, isStopping = false, hasEnded = false;

async function start() {
  llamasup = startLlamasup(program, process.env.LLAMASUP_MODEL ?? "demo");
  llamasup.ended.then((reason) => {
    hasEnded = true;
    if (!isStopping) dialog.showErrorBox("The model is not available", reason);
    app.quit();
  });
  const window = new BrowserWindow({ webPreferences: { preload: join(import.meta.dirname, "preload.cjs") } });
  // No other page may use what preload.cjs provides.
  window.webContents.on("will-navigate", (event) => event.preventDefault());
  window.webContents.setWindowOpenHandler(() => ({ action: "deny" }));
  await window.loadFile("index.html");
}

app.whenReady().then(start).catch((error) => {
  if (!isStopping) dialog.showErrorBox("The application could not be started", error.message);
  app.quit();
});

// llamasup refuses requests of web pages with a foreign origin, so the main process sends them.
ipcMain.handle("chat", async (event, messages) => {
  const { url } = await llamasup.ready;
  for await (const text of chat(url, messages)) event.sender.send("text", text);
});

app.on("window-all-closed", () => app.quit());
app.on("before-quit", (event) => {
  if (!llamasup || hasEnded) return;
  event.preventDefault(); // until all that llamasup has started is gone: then `ended` quits
  isStopping = true;
  llamasup.stop();
});
