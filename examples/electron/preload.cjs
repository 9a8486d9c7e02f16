// What the page may use of the main process.
const { contextBridge, ipcRenderer } = require("electron");

contextBridge.exposeInMainWorld("model", {
  chat: (messages) => ipcRenderer.invoke("chat", messages),
  onText: (show) => ipcRenderer.on("text", (_event, text) => show(text)),
});
