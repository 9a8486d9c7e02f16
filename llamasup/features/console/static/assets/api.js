// The control API and the models' API. Each failure is an ApiError with a message and a remedy.

// The page is at PREFIX/llamasup/, where a reverse proxy may have added a prefix.
const ROOT = new URL("..", location.href).pathname;
const CONTROL = `${ROOT}llamasup/v1`;
const HEADER = "X-Llamasup-Console";
const PAGE_SECRET = document.querySelector("meta[name=llamasup-page]").content;
const SECRET = `llamasup-secret${ROOT.slice(0, -1)}`; // several llamasups may have one origin
// Where llama-server's pages have the same address, this page is sandboxed: it has no storage that these pages could read.
const storage = (() => {
  try {
    return localStorage;
  } catch {
    const kept = new Map();
    return { getItem: (name) => kept.get(name), setItem: (name, value) => kept.set(name, value), removeItem: (name) => kept.delete(name) };
  }
})();
let signedOut = () => {};

export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `The server answered ${status}.`);
    this.status = status;
    this.cause = error.cause;
    this.remedy = error.remedy || "";
    this.details = error.details || [];
    this.acceptsKey = error.accepts_key ?? true; // where signing in was refused
  }
}

export function onSignedOut(listener) {
  signedOut = listener;
}

async function failure(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    // Not JSON: the status says what is known.
  }
  const error = typeof body.error === "object" && body.error !== null ? body.error : body;
  return new ApiError(response.status, { ...error, accepts_key: body.accepts_key });
}

// Without one, llamasup says how to sign in.
export async function session() {
  const asked = storage.getItem(SECRET);
  try {
    return await get("console/session");
  } catch (error) {
    if (error.cause === "console_page") location.reload(); // llamasup has started again
    if (error.status !== 401 || !asked || asked !== storage.getItem(SECRET)) throw error;
  }
  storage.removeItem(SECRET);
  return session();
}

// Without a session, an address that is closed for keys answers 403.
async function checkSession() {
  await session().catch((error) => error.status === 401 && !storage.getItem(SECRET) && signedOut(error));
}

async function send(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "llamasup does not answer.", remedy: "Check that it runs; this page tries again." });
  }
}

// A sign-in has no session yet.
const ownHeaders = () => ({ [HEADER]: storage.getItem(SECRET) ?? PAGE_SECRET });

export async function signIn(body) {
  const opened = await post("console/session", body);
  storage.setItem(SECRET, opened.secret);
  return opened;
}

export async function signOut() {
  await control("DELETE", "console/session").catch(() => {});
  storage.removeItem(SECRET);
}

export async function control(method, path, { body, signal, raw = false } = {}) {
  const headers = ownHeaders();
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await send(`${CONTROL}/${path}`, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
    credentials: "omit",
    cache: "no-store",
  });
  if (!response.ok) {
    const error = await failure(response);
    if ((error.status === 401 || error.status === 403) && path !== "console/session") checkSession();
    throw error;
  }
  return raw ? response : response.json();
}

export const get = (path, signal) => control("GET", path, { signal });
export const post = (path, body, signal) => control("POST", path, { body, signal });
export const modelPath = (id, rest) => `models/${encodeURIComponent(id)}/${rest}`;

// A request to a model, with the key that lives only in this page and in the memory of llamasup.
export async function infer(key, path, body, signal) {
  const headers = { ...ownHeaders(), "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await send(ROOT + path, { method: "POST", headers, body: JSON.stringify(body), signal, credentials: "omit", cache: "no-store" });
  if (!response.ok) throw await failure(response);
  return response;
}

// The data of each server-sent event of an answer.
export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      let end;
      while ((end = rest.indexOf("\n\n")) >= 0) {
        const frame = rest.slice(0, end);
        rest = rest.slice(end + 2);
        const data = frame.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
