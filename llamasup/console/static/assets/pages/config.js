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

// An edit that is not applied is the `draft` of the store, so it survives a visit of another page.
export default function Config() {
  const { draft } = useStore();
  const [config, setConfig] = useState(null);
  const [check, setCheck] = useState({ value: null, error: null });
  const [error, setError] = useState(null);
  const [applied, setApplied] = useState(null);
  const [applying, setApplying] = useState(false); // until the new version is known: the old one is refused
  const text = draft?.text ?? config?.text ?? "";
  const read = async () => {
    try {
      setConfig(await get("config"));
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  useEffect(() => void read(), []);
  const edit = (typed) => update({ draft: typed === config.text ? null : { text: typed, version: draft?.version ?? config.version } });
  useEffect(() => {
    if (!config?.file) return undefined;
    setCheck({ value: null, error: null }); // until the new text is checked
    const abort = new AbortController();
    const timer = setTimeout(() => {
      post("config/check", { text }, abort.signal).then(
        (value) => !abort.signal.aborted && setCheck({ value, error: null }),
        (problem) => !abort.signal.aborted && setCheck({ value: null, error: problem }),
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
  const apply = async () => {
    setError(null);
    setApplied(null);
    setApplying(true);
    try {
      setApplied(await control("PUT", "config", { body: draft }));
      const found = await get("config");
      setConfig(found);
      const typed = current().draft; // also while it was applied
      update({ draft: typed && typed.text !== draft.text ? { text: typed.text, version: found.version } : null });
    } catch (problem) {
      setError(problem);
    } finally {
      setApplying(false);
    }
  };
  const discard = async () => {
    await read();
    update({ draft: null });
  };
  if (!config) return html`<${Problem} error=${error} />`;
  if (!config.file) return html`<p class="note">This llamasup has no config file.</p>`;
  const { value } = check;
  return html`<p class="note">${config.file}${config.writable ? "" : " The console cannot write it."}</p>
    <label class="field wide"><span>Config file</span>
      <textarea class="code" rows="20" spellcheck="false" readonly=${!config.writable} value=${text} onInput=${(event) => edit(event.target.value)}></textarea></label>
    <div aria-live="polite">${value && !value.ok && html`<ul class="problem">${value.mistakes.map((mistake) => html`<li>Line ${mistake.line ?? "–"}: ${mistake.key ? `${mistake.key}: ` : ""}${mistake.message}</li>`)}</ul>`}
      ${value?.ok && html`<${Changes} title="What this text would change" changes=${value.changes} />`}</div>
    <${Problem} error=${check.error} />
    <${Problem} error=${error} />
    ${error?.status === 409 && html`<p class="note">Copy your text first: “Read again” replaces it.</p>`}
    <p class="actions"><button disabled=${!config.writable || !draft || !value?.ok || applying} onClick=${apply}>Apply</button>
      <button class="quiet" onClick=${discard}>Read again</button></p>
    ${applied && html`<${Changes} title="Applied" changes=${applied} />`}`;
}

function Changes({ title, changes }) {
  const named = Object.entries(CHANGES).filter(([name]) => changes?.[name]?.length);
  return html`<h2>${title}</h2>${named.length === 0
    ? html`<p class="note">Nothing changes.</p>`
    : html`<ul>${named.map(([name, words]) => html`<li key=${name}>${words}: ${changes[name].join(", ")}</li>`)}</ul>`}`;
}
