import { useEffect, useState } from "../vendor/hooks.module.js";
import { post } from "../api.js";
import { bytes, count, shortArguments } from "../format.js";
import { html } from "../html.js";
import { ModelChoice, Problem, useStore } from "../parts.js";

const KV_TYPES = ["f16", "q8_0", "q5_1", "q4_0"];
const SMALLEST_CONTEXT = 512;
const PAUSE_MS = 120;
const LARGEST_POWER = 11; // 512 × 2^11 = 1,048,576 tokens

// The text after # is a model, or the path of a file.
export default function Plan({ model }) {
  const { status } = useStore();
  const models = status?.models ?? [];
  const isFile = model.startsWith("/");
  const chosen = model || models[0]?.id || "";
  const choose = (name) => (location.hash = `#plan/${encodeURIComponent(name)}`);
  const [path, setPath] = useState(""); // as typed
  useEffect(() => setPath(isFile ? model : ""), [model]);
  const chooseFile = (event) => {
    event.preventDefault();
    if (path.trim()) choose(path.trim());
  };
  return html`<p class="note">Nothing is started or changed here.</p>
    <div class="fields">
      <${ModelChoice} label="Model" optional=${isFile} models=${models} value=${isFile ? "" : chosen} onChange=${(id) => choose(id)} />
      <form class="fields" onSubmit=${chooseFile}><label class="field"><span>Or a GGUF file of the server</span>
        <input pattern=" */.*" title="An absolute path, such as /models/model.gguf" placeholder="/models/model.gguf" value=${path} onInput=${(event) => setPath(event.target.value)} spellcheck="false" autocomplete="off" /></label>
        <p class="field"><button>Plan the file</button></p></form>
    </div>
    ${chosen && html`<${Planned} key=${chosen} model=${chosen} />`}`;
}

function Planned({ model }) {
  const [settings, setSettings] = useState({});
  const [found, setFound] = useState({ plan: null, error: null });
  useEffect(() => {
    const abort = new AbortController(); // only the answer to the newest question counts
    const ask = () =>
      post("plan", { model, settings }, abort.signal).then(
        (plan) => !abort.signal.aborted && setFound({ plan, error: null }),
        (error) => !abort.signal.aborted && setFound({ plan: null, error }),
      );
    // The first plan at once; a slider that moves passes many values.
    const timer = setTimeout(ask, found.plan || found.error ? PAUSE_MS : 0);
    return () => {
      clearTimeout(timer);
      abort.abort();
    };
  }, [model, settings]);
  const set = (name, value) =>
    setSettings((before) => {
      const { [name]: _, ...others } = before;
      return value === null ? others : { ...others, [name]: value };
    });
  return html`<div class="fields">
      <${Slider} label="Context per request" unit="tokens" max=${LARGEST_POWER} value=${settings.ctx_size} toValue=${(power) => SMALLEST_CONTEXT * 2 ** power} fromValue=${(size) => Math.log2(size / SMALLEST_CONTEXT)} start=${3} onChange=${(value) => set("ctx_size", value)} />
      <${Slider} label="Slots" unit="" max=${31} value=${settings.parallel} toValue=${(step) => step + 1} fromValue=${(slots) => slots - 1} start=${3} onChange=${(value) => set("parallel", value)} />
      <${Slider} label="GPU layers" unit="" max=${128} value=${settings.gpu_layers} toValue=${(step) => step} fromValue=${(layers) => layers} start=${0} onChange=${(value) => set("gpu_layers", value)} />
      <label class="field"><span>KV type</span><select value=${settings.kv_type ?? ""} onChange=${(event) => set("kv_type", event.target.value || null)}>
        <option value="">as configured</option>${KV_TYPES.map((type) => html`<option value=${type}>${type}</option>`)}</select></label>
    </div>
    <${Problem} error=${found.error} />
    ${found.plan && html`<${Answer} plan=${found.plan} />`}`;
}

function Slider({ label, unit, max, value, toValue, fromValue, start, onChange }) {
  const isSet = value !== undefined;
  const shown = isSet ? `${count(value)} ${unit}` : "as configured";
  return html`<div class="field"><label><span>${label}: <strong>${shown}</strong></span>
      <input type="range" min="0" max=${max} step="1" value=${isSet ? fromValue(value) : start} aria-valuetext=${shown} onInput=${(event) => onChange(toValue(Number(event.target.value)))} /></label>
    ${isSet && html`<button class="quiet" onClick=${() => onChange(null)} aria-label=${`${label}: as configured`}>Reset</button>`}</div>`;
}

function Answer({ plan }) {
  return html`<div aria-live="polite">
      ${plan.problem && html`<${Problem} error=${plan.problem} />`}
      <div class="scroll"><table><thead><tr><th>Device</th><th class="number">Needed</th><th class="number">Free</th><th>Fits</th></tr></thead>
        <tbody>${Object.entries(plan.devices).map(([name, device]) => html`<tr key=${name}><th scope="row">${name === "ram" ? "RAM" : name}</th>
          <td class="number">${bytes(device.needed_bytes)}</td><td class="number">${bytes(device.free_bytes)}</td>
          <td class=${device.fits ? "good" : "bad"}>${device.fits ? "yes" : "no"}</td></tr>`)}</tbody></table></div>
      <p>${plan.evicts.length ? `It would unload ${plan.evicts.join(", ")}.` : "No other model would be unloaded for it."}</p>
    </div>
    <h2>Command line</h2>
    <pre class="command" tabindex="0">${shortArguments(plan.argv)}</pre>
    <div class="scroll"><table><thead><tr><th>Flag</th><th>Value</th><th>Reason</th></tr></thead>
      <tbody>${(plan.reasons ?? []).map((reason) => html`<tr key=${reason.flag} class=${reason.passed ? null : "left-out"}><th scope="row"><code>${reason.flag}</code></th><td>${reason.value ?? ""}</td><td>${reason.reason}</td></tr>`)}</tbody></table></div>`;
}
