import { useEffect, useState } from "../vendor/hooks.module.js";
import { control, get, post } from "../api.js";
import { html } from "../html.js";
import { Problem } from "../parts.js";

const CHECK_DELAY_MS = 300;
const CHANGES = {
  added: "Added models",
  removed: "Removed models",
  changed: "Models that get a new process",
  retouched: "Models that change without a new process",
  settings: "Settings that apply at once",
  next_start: "Settings that apply at the next start",
};

export default function Config() {
  const [config, setConfig] = useState(null);
  const [text, setText] = useState("");
  const [check, setCheck] = useState(null);
  const [error, setError] = useState(null);
  const [applied, setApplied] = useState(null);
  const read = async () => {
    try {
      const found = await get("config");
      setConfig(found);
      setText(found.text);
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  useEffect(() => void read(), []);
  useEffect(() => {
    if (!config) return undefined;
    setCheck(null); // until the new text is checked
    const abort = new AbortController();
    const timer = setTimeout(() => {
      post("config/check", { text }, abort.signal).then(setCheck, (problem) => !abort.signal.aborted && setError(problem));
    }, CHECK_DELAY_MS);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [text, config]);
  const apply = async () => {
    setError(null);
    setApplied(null);
    try {
      setApplied(await control("PUT", "config", { body: { text, version: config.version } }));
      await read();
    } catch (problem) {
      setError(problem);
    }
  };
  if (!config) return html`<${Problem} error=${error} />`;
  const isChanged = text !== config.text;
  return html`<p class="note">${config.file ?? "This llamasup has no config file."}${config.writable ? "" : " The console cannot write it."}</p>
    <label class="field wide"><span>Config file</span>
      <textarea class="code" rows="20" spellcheck="false" readonly=${!config.writable} value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
    <div aria-live="polite">${check && !check.ok && html`<ul class="problem">${check.mistakes.map((mistake) => html`<li>Line ${mistake.line ?? "–"}: ${mistake.key ? `${mistake.key}: ` : ""}${mistake.message}</li>`)}</ul>`}
      ${check?.ok && html`<${Changes} title="What this text would change" changes=${check.changes} />`}</div>
    <${Problem} error=${error} />
    ${error?.status === 409 && html`<p class="note">Copy your text first: “Read again” replaces it.</p>`}
    <p class="actions"><button disabled=${!config.writable || !isChanged || !check?.ok} onClick=${apply}>Apply</button>
      <button class="quiet" onClick=${read}>Read again</button></p>
    ${applied && html`<${Changes} title="Applied" changes=${applied} />`}`;
}

function Changes({ title, changes }) {
  const named = Object.entries(CHANGES).filter(([name]) => changes?.[name]?.length);
  return html`<h2>${title}</h2>${named.length === 0
    ? html`<p class="note">Nothing changes.</p>`
    : html`<ul>${named.map(([name, words]) => html`<li key=${name}>${words}: ${changes[name].join(", ")}</li>`)}</ul>`}`;
}
