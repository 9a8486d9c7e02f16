// Small parts that several pages use.
import { useEffect, useState } from "./vendor/hooks.module.js";
import { current, subscribe } from "./store.js";
import { html } from "./html.js";

export function useStore() {
  const [state, setState] = useState(current());
  useEffect(() => {
    setState(current());
    return subscribe(setState);
  }, []);
  return state;
}

// Runs `ask(signal)` now and each `every_ms` while the tab is visible, until it is not found.
export function useAnswer(ask, inputs, every_ms = 0) {
  const [found, setFound] = useState({ value: null, error: null });
  useEffect(() => {
    const abort = new AbortController();
    let timer = 0;
    let asked = 0;
    const run = async () => {
      clearTimeout(timer);
      if (document.hidden) return;
      const mine = ++asked;
      const isLast = () => mine === asked && !abort.signal.aborted; // not after a tab that was hidden and shown
      try {
        const value = await ask(abort.signal);
        if (isLast()) setFound({ value, error: null });
      } catch (error) {
        if (error.status === 404) every_ms = 0; // this llamasup does not offer it
        if (isLast()) setFound((before) => ({ ...before, error }));
      }
      if (every_ms && isLast()) timer = setTimeout(run, every_ms);
    };
    run();
    document.addEventListener("visibilitychange", run);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", run);
    };
  }, inputs);
  return found;
}

export function Problem({ error }) {
  if (!error) return null;
  if (error.status === 404 && error.message.endsWith("no such path")) {
    return html`<p class="note">This llamasup does not have this function.</p>`;
  }
  return html`<div class="problem" role="alert">
    <p>${error.message}</p>
    ${error.details?.length > 0 && html`<ul>${error.details.map((detail) => html`<li>${detail}</li>`)}</ul>`}
    ${error.remedy && html`<p class="remedy">→ ${error.remedy}</p>`}
  </div>`;
}

// Columns are {title, of, number, head, tone}: `of` and `tone` take a row. The column with `head` names the row.
// On a narrow page a row is a block, and each of its cells shows its title (console.css).
export function Table({ name, columns, rows, idOf, toneOf }) {
  const classOf = ({ number, tone }, row) => [number && "number", row && tone?.(row)].filter(Boolean).join(" ") || null;
  return html`<div class="scroll"><table class=${name}>
    <thead><tr>${columns.map((column) => html`<th class=${classOf(column)}>${column.title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${idOf(row)} class=${toneOf?.(row)}>${columns.map((column) => column.head
      ? html`<th scope="row">${column.of(row)}</th>`
      : html`<td class=${classOf(column, row)} data-title=${column.title}>${column.of(row)}</td>`)}</tr>`)}</tbody></table></div>`;
}

export function State({ state }) {
  return html`<span class=${`state state-${state}`}>${state}</span>`;
}

// `empty`: what the choice of no model is called, if there is one.
export function ModelChoice({ label, models, value, onChange, empty }) {
  return html`<label class="field"><span>${label}</span>
    <select value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${empty && html`<option value="">${empty}</option>`}
      ${models.map((model) => html`<option key=${model.id} value=${model.id}>${model.id}</option>`)}
    </select></label>`;
}
