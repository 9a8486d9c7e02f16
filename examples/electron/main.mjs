// A window that chats with a model. llamasup starts and ends with the application.
import { join } from "node:path";
import { app, BrowserWindow, dialog, ipcMain } from "electron";
import { chat, startLlamasup } from "./llamasup.mjs";

// In the packaged application, the folder of scripts/bundle lies in its resources (package.json).
const bundled = [join(process.resourcesPath ?? "", "llamasup", "llamasup")];
const command = app.isPackaged ? bundled : (process.env.LLAMASUP ?? "llamasup").split(" ");
let llamasup, isStopped = false;

app.whenReady().then(async () => {
  llamasup = startLlamasup(command, process.env.LLAMASUP_MODEL ?? "demo");
  llamasup.ready.catch((error) => {
    if (!isStopped) dialog.showErrorBox("The model could not be started", error.message);
    app.quit();
  });
  const window = new BrowserWindow({ webPreferences: { preload: join(import.meta.dirname, "preload.cjs") } });
  await window.loadFile("index.html");
});

// llamasup refuses requests of web pages with a foreign origin, so the main process sends them.
ipcMain.handle("chat", async (event, messages) => {
  const { url } = await llamasup.ready;
  for await (const text of chat(url, messages)) event.sender.send("text", text);
});

app.on("window-all-closed", () => app.quit());
app.on("before-quit", (event) => {
  if (!llamasup || isStopped) return;
  isStopped = true;
  event.preventDefault(); // until all that llamasup has started is gone
  llamasup.stop().then(() => app.quit());
});
