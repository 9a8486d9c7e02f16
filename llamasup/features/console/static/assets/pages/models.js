import { useState } from "../vendor/hooks.module.js";
import { get, modelPath, post } from "../api.js";
import { History } from "../charts.js";
import { bytes, clock, count, percent, seconds } from "../format.js";
import { html } from "../html.js";
import { Problem, State, useAnswer, useStore } from "../parts.js";
import { refreshStatus } from "../store.js";

const SHOWN = 100;
const NO_HISTORY = { series: { time: [] } }; // in its place, so that nothing moves when it comes
const SHOWN_DECISIONS = 5;
const LOADED = new Set(["starting", "loading", "warming", "ready", "draining", "backoff"]);
// A restart passes through "stopping": an "Unload" pressed then must not be lost.
const UNLOADABLE = new Set([...LOADED, "stopping", "waiting"]);

export default function Models() {
  const { status } = useStore();
  const [filter, setFilter] = useState("");
  const [shown, setShown] = useState(SHOWN);
  const history = useAnswer((signal) => get("history", signal), [], 5000);
  if (!status) return html`<p class="note">Loading…</p>`;
  const wanted = filter.toLowerCase();
  const found = status.models.filter((model) => [model.id, ...model.aliases].some((name) => name.toLowerCase().includes(wanted)));
  return html`
    <${Problem} error=${history.error} />
    <${History} history=${history.value ?? (history.error ? null : NO_HISTORY)} />
    <label class="field"><span>Find a model</span>
      <input type="search" value=${filter} onInput=${(event) => { setFilter(event.target.value); setShown(SHOWN); }} /></label>
    <p class="note" role="status">${count(found.length)} of ${count(status.models.length)} models</p>
    <ul class="cards">${found.slice(0, shown).map((model) => html`<${Model} key=${model.id} model=${model} />`)}</ul>
    ${found.length > shown && html`<button onClick=${() => setShown(shown + SHOWN)}>Show more</button>`}
    ${(status.nodes ?? []).map((node) => html`<${Node} key=${node.name} node=${node} />`)}`;
}

function Node({ node }) {
  return html`<section aria-label=${`Node ${node.name}`}>
    <h2>Node ${node.name} <${State} state=${node.state} /></h2>
    <p class="note">${node.url}</p>
    ${node.reason && html`<${Problem} error=${{ message: node.reason, remedy: node.remedy }} />`}
    <ul class="cards">${node.models.map((model) => html`<li class="card" key=${model.id}>
      <h3>${model.id} <${State} state=${model.state} /></h3>
      ${model.load && html`<${Progress} load=${model.load} name=${`${model.id} on ${node.name}`} />`}
      <dl class="facts">
        <div><dt>Context</dt><dd>${model.ctx_size ? `${count(model.ctx_size)} tokens` : "–"}</dd></div>
        <div><dt>Slots</dt><dd>${model.slots ? `${model.slots_busy} of ${model.slots} busy` : "–"}</dd></div>
        <div><dt>Requests from this node</dt><dd>${count(model.in_flight)}</dd></div>
        <div><dt>Queued requests</dt><dd>${count(model.queued)}</dd></div>
      </dl></li>`)}</ul>
  </section>`;
}

function Model({ model }) {
  const [error, setError] = useState(null);
  const [asksWhy, setAsksWhy] = useState(false);
  // Without waiting: a browser has few connections to a host. The state, the progress and the problem of the
  // model come with the events.
  const act = (what) => async () => {
    setError(null);
    try {
      await post(modelPath(model.id, `${what}?wait=0`));
    } catch (problem) {
      setError(problem);
    }
    refreshStatus();
  };
  const isIdle = model.state === "stopped" || model.state === "failed";
  const memory = (model.memory?.ram_bytes ?? 0) + (model.memory?.vram_bytes ?? 0);
  const facts = [
    ["Size", bytes(model.size_bytes)],
    ["Device", model.device ?? "–"],
    ["Context", model.ctx_size ? `${count(model.ctx_size)} tokens` : "–"],
    ["Slots", model.slots ? `${model.slots_busy ?? 0} of ${model.slots} busy` : "–"],
    ["Queue", count(model.queued)],
    ["Memory", memory ? bytes(memory) : "–"],
    ["Restarts", count(model.restarts)],
  ];
  if (model.replicas) facts.push(["Replicas", `${model.replicas.filter((replica) => replica.state === "ready").length} of ${model.replicas.length} ready`]);
  // The buttons are above all that comes and goes: they must not move while they are pressed.
  return html`<li class="card">
    <h2>${model.id} <${State} state=${model.state} /></h2>
    <p class="actions">
      <button disabled=${!isIdle} onClick=${act("load")} aria-label=${`Load ${model.id}`}>Load</button>
      <button disabled=${!UNLOADABLE.has(model.state)} onClick=${act("unload")} aria-label=${`Unload ${model.id}`}>Unload</button>
      <button disabled=${!LOADED.has(model.state)} onClick=${act("restart")} aria-label=${`Restart ${model.id}`}>Restart</button>
      <button class="quiet" aria-expanded=${asksWhy} onClick=${() => setAsksWhy(!asksWhy)} aria-label=${`Why is ${model.id} ${model.state}?`}>Why?</button>
      <a href=${`#logs/${encodeURIComponent(model.id)}`} aria-label=${`Log of ${model.id}`}>Log</a>
    </p>
    <${Problem} error=${error} />
    ${asksWhy && html`<${Why} model=${model} />`}
    ${model.aliases.length > 0 && html`<p class="note">Aliases: ${model.aliases.join(", ")}</p>`}
    ${model.load && html`<${Progress} load=${model.load} name=${model.id} />`}
    <dl class="facts">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${model.replicas && html`<${Replicas} replicas=${model.replicas} name=${model.id} />`}
    ${model.problem && html`<${Problem} error=${{ message: model.problem, remedy: model.remedy }} />`}
    ${model.last_exit && html`<${LastEnd} end=${model.last_exit} />`}
  </li>`;
}

function Progress({ load, name }) {
  const text = [load.reason, load.percent != null && percent(load.percent), load.eta_s != null && `about ${seconds(load.eta_s)} left`].filter(Boolean).join(", ");
  return html`<p class="progress"><progress max="100" value=${load.percent ?? null} aria-label=${`Progress of ${name}`} /> ${text}</p>`;
}

function Replicas({ replicas, name }) {
  return html`<ul class="replicas" aria-label=${`Replicas of ${name}`}>${replicas.map((replica) => html`<li>
    <${State} state=${replica.state} /> ${[replica.device, `${count(replica.in_flight)} in flight`, replica.restarts && `${count(replica.restarts)} restarts`].filter(Boolean).join(", ")}</li>`)}</ul>`;
}

function LastEnd({ end }) {
  const { cause, remedy, code, signal } = end;
  const how = signal ?? (code === null ? "" : `exit code ${code}`);
  return html`<p class="note">Last end: ${[cause, how].filter(Boolean).join(", ")}
    ${remedy && html`<br />→ ${remedy}`}</p>`;
}

function Why({ model }) {
  const { value, error } = useAnswer((signal) => get(modelPath(model.id, "why"), signal), [model.id, model.state]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!value) return html`<p class="note">Loading…</p>`;
  return html`<div class="why">
    ${value.sentences.map((sentence) => html`<p>${sentence}</p>`)}
    ${value.change.length > 0 && html`<ul>${value.change.map((change) => html`<li>${change}</li>`)}</ul>`}
    ${value.decisions.length > 0 && html`<h3>Decisions</h3><ul class="decisions">${value.decisions.slice(0, SHOWN_DECISIONS).map((decision) => html`<li><time datetime=${decision.time}>${clock(decision.time)}</time> ${decision.text}</li>`)}</ul>`}
  </div>`;
}
