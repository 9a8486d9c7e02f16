import { useEffect, useRef, useState } from "../vendor/hooks.module.js";
import { eventsOf, infer } from "../api.js";
import { count, rate, seconds } from "../format.js";
import { html } from "../html.js";
import { ModelChoice, Problem, useStore } from "../parts.js";

const TASKS = { chat: "Chat", embeddings: "Embeddings", rerank: "Rerank" };
const SHOWN_NUMBERS = 8;

export default function Playground() {
  const [task, setTask] = useState("chat");
  return html`<p class="tabs" role="group" aria-label="What to try">${Object.entries(TASKS).map(([name, title]) => html`<button key=${name} aria-pressed=${name === task} onClick=${() => setTask(name)}>${title}</button>`)}</p>
    ${task === "chat" ? html`<${Chat} />` : html`<${Single} key=${task} task=${task} />`}`;
}

function Chat() {
  const { status, session } = useStore();
  const models = status?.models ?? [];
  const [sides, setSides] = useState(["", ""]);
  const [system, setSystem] = useState("");
  const [sampling, setSampling] = useState({ temperature: "0.8", top_p: "0.95", max_tokens: "512" }); // as typed
  const [text, setText] = useState("");
  const [talks, setTalks] = useState([[], []]);
  const [isBusy, setIsBusy] = useState(false);
  const abort = useRef(null);
  useEffect(() => () => abort.current?.abort(), []);
  const chosen = [sides[0] || models[0]?.id || "", sides[1]];
  const setTalk = (side, talk) => setTalks((before) => before.map((other, number) => (number === side ? talk : other)));
  const ask = async (event) => {
    event.preventDefault();
    if (!text.trim() || isBusy) return;
    abort.current = new AbortController();
    setIsBusy(true);
    setText("");
    const { signal } = abort.current;
    await Promise.all(chosen.map((model, side) => model && answer(model, [...talks[side], { role: "user", content: text }], side, signal)));
    setIsBusy(false);
  };
  const answer = async (model, asked, side, signal) => {
    const started = performance.now();
    const reply = { role: "assistant", content: "", reasoning: "", first_s: null, tokens: 0, speed: null, error: null };
    const show = () => setTalk(side, [...asked, { ...reply }]);
    show();
    const numbers = Object.fromEntries(Object.entries(sampling).filter(([, typed]) => typed).map(([name, typed]) => [name, Number(typed)]));
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...answered(asked)];
    try {
      const response = await infer(session.inference_key, "v1/chat/completions", { model, messages, ...numbers, stream: true, stream_options: { include_usage: true } }, signal);
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw chunk.error;
        const delta = chunk.choices?.[0]?.delta;
        if (delta?.reasoning_content || delta?.content) reply.first_s ??= (performance.now() - started) / 1000;
        reply.reasoning += delta?.reasoning_content ?? "";
        reply.content += delta?.content ?? "";
        if (chunk.usage) reply.tokens = chunk.usage.completion_tokens;
        if (chunk.timings) reply.speed = chunk.timings.predicted_per_second;
        show();
      }
    } catch (error) {
      if (!signal.aborted) reply.error = error;
    }
    show();
  };
  const number = (name, label, min, max, step) => html`<label class="field small"><span>${label}</span><input type="number" min=${min} max=${max} step=${step} value=${sampling[name]} onInput=${(event) => setSampling({ ...sampling, [name]: event.target.value })} /></label>`;
  return html`<div class="fields">
      <${ModelChoice} label="Model" models=${models} value=${chosen[0]} onChange=${(id) => setSides([id, sides[1]])} />
      <${ModelChoice} label="Second model" empty="none" models=${models} value=${chosen[1]} onChange=${(id) => setSides([sides[0], id])} />
      ${number("temperature", "Temperature", 0, 2, 0.1)} ${number("top_p", "Top p", 0, 1, 0.05)} ${number("max_tokens", "Max tokens", 1, 100000, 1)}
    </div>
    <label class="field wide"><span>System prompt</span><textarea rows="2" value=${system} onInput=${(event) => setSystem(event.target.value)}></textarea></label>
    <div class="sides">${chosen.map((model, side) => model && html`<section key=${side} class="card" aria-label=${`Answers of ${model}`}><h2>${model}</h2>${talks[side].map((said, place) => html`<${Said} key=${place} said=${said} />`)}</section>`)}</div>
    <form onSubmit=${ask}><label class="field wide"><span>Message</span>
      <textarea rows="3" value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && ask(event)}></textarea></label>
      <p class="actions"><button disabled=${isBusy || !text.trim()}>Send</button>
        <button type="button" disabled=${!isBusy} onClick=${() => abort.current?.abort()}>Stop</button>
        <button type="button" class="quiet" disabled=${isBusy} onClick=${() => setTalks([[], []])}>Clear</button></p></form>`;
}

// The messages to send: a question without an answer is left out, unless it is the last one; so is reasoning.
function answered(talk) {
  const isKept = ({ role, content }, place) => (role === "user" ? (talk[place + 1]?.content ?? "new") : content) !== "";
  return talk.filter(isKept).map(({ role, content }) => ({ role, content }));
}

function Said({ said }) {
  const facts = said.role === "assistant" && said.first_s !== null && `first token after ${seconds(said.first_s)}${said.tokens ? `, ${count(said.tokens)} tokens` : ""}${said.speed ? `, ${rate(said.speed)}` : ""}`;
  return html`<div class=${`said ${said.role}`}>${said.reasoning && html`<p class="text note">${said.reasoning}</p>`}<p class="text">${said.content}</p>${facts && html`<p class="note">${facts}</p>`}<${Problem} error=${said.error} /></div>`;
}

function Single({ task }) {
  const { status, session } = useStore();
  const models = status?.models ?? [];
  const fitting = { embeddings: "encoder", rerank: "reranker" }[task];
  const [model, setModel] = useState("");
  const [text, setText] = useState("");
  const [documents, setDocuments] = useState("");
  const [found, setFound] = useState({ value: null, lines: [], error: null, took: null });
  const asked = useRef(0);
  const chosen = model || models.find((known) => known.class === fitting)?.id || models[0]?.id || "";
  const ask = async (event) => {
    event.preventDefault();
    const mine = ++asked.current;
    const show = (what) => mine === asked.current && setFound({ value: null, lines, error: null, took: null, ...what });
    const started = performance.now();
    const lines = documents.split("\n").filter(Boolean);
    const body = task === "embeddings" ? { model: chosen, input: text } : { model: chosen, query: text, documents: lines };
    try {
      const value = await (await infer(session.inference_key, `v1/${task}`, body)).json();
      show({ value, took: (performance.now() - started) / 1000 });
    } catch (error) {
      show({ error });
    }
  };
  const vector = found.value?.data?.[0]?.embedding;
  return html`<form onSubmit=${ask}>
      <${ModelChoice} label="Model" models=${models} value=${chosen} onChange=${setModel} />
      <label class="field wide"><span>${task === "rerank" ? "Query" : "Text"}</span><textarea rows="2" required value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
      ${task === "rerank" && html`<label class="field wide"><span>Documents, one per line</span><textarea rows="5" required value=${documents} onInput=${(event) => setDocuments(event.target.value)}></textarea></label>`}
      <p class="actions"><button>${TASKS[task]}</button></p></form>
    <${Problem} error=${found.error} />
    <div aria-live="polite">${found.took !== null && html`<p class="note">answered after ${seconds(found.took)}</p>`}
      ${vector && html`<p>${count(vector.length)} numbers: <code>${vector.slice(0, SHOWN_NUMBERS).map((value) => value.toFixed(4)).join(", ")}…</code></p>`}
      ${found.value?.results && html`<ol>${[...found.value.results].sort((one, other) => other.relevance_score - one.relevance_score).map((result) => html`<li key=${result.index}>${result.relevance_score.toFixed(4)}: ${found.lines[result.index]}</li>`)}</ol>`}</div>`;
}
