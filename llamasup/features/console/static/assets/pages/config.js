import { useEffect, useState } from "../vendor/hooks.module.js";
import { control, get, post } from "../api.js";
import { html } from "../html.js";
import { Problem, useStore } from "../parts.js";
import { current, update } from "../store.js";

const CHECK_DELAY_MS = 300;
const CHANGES = {
  added: "Added models",
  removed: "Removed models",
  changed: "Models that get a new process",
  retouched: "Models that change without a new process",
  settings: "Settings that apply at once",
  next_start: "Settings that apply at the next start",
};

// All this is in the store, so it survives a visit of another page: the file as it was read last (`config`), an
// edit that is not applied (`draft`), whether one is being applied (`applying`), and what came of it (`applied`).
let asked = 0;

async function read() {
  const mine = ++asked;
  const config = await get("config");
  if (mine === asked) update({ config });
}

async function send(draft) {
  update({ applying: true, applied: {} });
  asked += 1; // what is read meanwhile may be the file before
  try {
    update({ applied: { changes: await control("PUT", "config", { body: draft }) } });
    await read(); // the next change has to name the new version
    const { draft: typed, config } = current(); // also typed while it was applied
    update({ draft: typed && ![draft.text, config.text].includes(typed.text) ? { text: typed.text, version: config.version } : null });
  } catch (error) {
    update({ applied: { ...current().applied, error } });
  } finally {
    update({ applying: false });
  }
}

export default function Config() {
  const { draft, config, applying, applied } = useStore();
  const [check, setCheck] = useState({});
  const [error, setError] = useState(null);
  const text = draft?.text ?? config?.text ?? "";
  const attempt = async (action) => {
    setError(null);
    try {
      await action();
    } catch (problem) {
      setError(problem);
    }
  };
  useEffect(() => void (applying || attempt(read)), [applying && !config]); // also when an Apply ends that found no file
  useEffect(() => () => current().applying || update({ applied: {} }), []); // it has been seen
  const edit = (typed) => update({ draft: typed === config.text && !applying ? null : { text: typed, version: draft?.version ?? config.version } });
  useEffect(() => {
    if (!config?.file) return undefined;
    const abort = new AbortController();
    const timer = setTimeout(() => {
      post("config/check", { text }, abort.signal).then(
        (value) => !abort.signal.aborted && setCheck({ text, config, value }),
        (problem) => !abort.signal.aborted && setCheck({ text, config, error: problem }),
      );
    }, CHECK_DELAY_MS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [text, config]);
  useEffect(() => {
    if (!draft) return undefined;
    const ask = (event) => event.preventDefault(); // the browser asks before it closes the tab
    addEventListener("beforeunload", ask);
    return () => removeEventListener("beforeunload", ask);
  }, [draft !== null]);
  const apply = () => {
    setError(null);
    send(draft);
  };
  const discard = () => attempt(async () => {
    await read();
    update({ draft: null, applied: {} });
  });
  if (!config) return html`<${Problem} error=${error} />`;
  if (!config.file) return html`<p class="note">This llamasup has no config file.</p>`;
  // What was found about another text is not shown, and permits nothing.
  const { value, error: refused } = check.text === text && check.config === config ? check : {};
  return html`<p class="note">${config.file}${config.writable ? "" : " The console cannot change this file."}</p>
    <label class="field wide"><span>Config file</span>
      <textarea class="code" rows="20" spellcheck="false" readonly=${!config.writable} value=${text} onInput=${(event) => edit(event.target.value)}></textarea></label>
    <p class="actions"><button disabled=${!config.writable || !draft || !value?.ok || applying} onClick=${apply}>Apply</button>
      <button class="quiet" disabled=${applying} onClick=${discard}>Reload from disk</button></p>
    <div aria-live="polite">${value && !value.ok && html`<ul class="problem">${value.mistakes.map((mistake) => html`<li>Line ${mistake.line ?? "–"}: ${mistake.key ? `${mistake.key}: ` : ""}${mistake.message}</li>`)}</ul>`}
      ${value?.ok && html`<${Changes} title="What this text would change" changes=${value.changes} />`}</div>
    <${Problem} error=${refused} />
    <${Problem} error=${error ?? applied.error} />
    ${applied.error?.status === 409 && html`<p class="note">Copy your text first: “Reload from disk” replaces it.</p>`}
    ${applied.changes && html`<${Changes} title="Applied" changes=${applied.changes} />`}`;
}

function Changes({ title, changes }) {
  const named = Object.entries(CHANGES).filter(([name]) => changes?.[name]?.length);
  return html`<h2>${title}</h2>${named.length === 0
    ? html`<p class="note">Nothing changes.</p>`
    : html`<ul>${named.map(([name, words]) => html`<li key=${name}>${words}: ${changes[name].join(", ")}</li>`)}</ul>`}`;
}
