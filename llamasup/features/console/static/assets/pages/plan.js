import { useEffect, useState } from "../vendor/hooks.module.js";
import { post } from "../api.js";
import { bytes, count, shortArguments } from "../format.js";
import { html } from "../html.js";
import { ModelChoice, Problem, Table, useStore } from "../parts.js";

const KV_TYPES = ["f16", "q8_0", "q5_1", "q4_0"];
const SMALLEST_CONTEXT = 512;
const PAUSE_MS = 120;
const LARGEST_POWER = 11; // 512 × 2^11 = 1,048,576 tokens
const DEVICES = [
  { title: "Device", of: ([name]) => (name === "ram" ? "RAM" : name), head: true },
  { title: "Needed", of: ([, device]) => bytes(device.needed_bytes), number: true },
  { title: "Free", of: ([, device]) => bytes(device.free_bytes), number: true },
  { title: "Fits", of: ([, device]) => (device.fits ? "yes" : "no"), tone: ([, device]) => (device.fits ? "good" : "bad") },
];
const FLAGS = [
  { title: "Flag", of: (reason) => html`<code>${reason.flag}</code>`, head: true },
  { title: "Value", of: (reason) => reason.value ?? "" },
  { title: "Reason", of: (reason) => reason.reason },
];

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
  return html`<p class="note">This page starts and changes nothing.</p>
    <div class="fields">
      <${ModelChoice} label="Model" empty=${isFile && "none"} models=${models} value=${isFile ? "" : chosen} onChange=${(id) => choose(id)} />
      <form class="fields" onSubmit=${chooseFile}><label class="field"><span>Or a GGUF file of the server</span>
        <input pattern=" */.*" title="An absolute path, such as /models/model.gguf" placeholder="/models/model.gguf" value=${path} onInput=${(event) => setPath(event.target.value)} spellcheck="false" autocomplete="off" /></label>
        <p class="field"><button>Show plan</button></p></form>
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
      <${Table} columns=${DEVICES} rows=${Object.entries(plan.devices)} idOf=${([name]) => name} />
      <p>${plan.evicts.length ? `This plan would unload ${plan.evicts.join(", ")}.` : "No other model would be unloaded."}</p>
    </div>
    <h2>Command line</h2>
    <pre class="command" tabindex="0">${shortArguments(plan.argv)}</pre>
    <${Table} columns=${FLAGS} rows=${plan.reasons ?? []} idOf=${(reason) => reason.flag} toneOf=${(reason) => (reason.passed ? null : "left-out")} />`;
}
