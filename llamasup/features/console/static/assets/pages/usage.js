import { useState } from "../vendor/hooks.module.js";
import { get } from "../api.js";
import { Chart } from "../charts.js";
import { count, energy, mark, seconds, UNKNOWN } from "../format.js";
import { html } from "../html.js";
import { Problem, Table, useAnswer } from "../parts.js";

// A day begins at the local midnight of llamasup, which may be in another time zone than the browser.
const lastDays = (days) => `${days - 1}d`;
const DAY_S = 86_400;
const secondsOf = (day) => Date.parse(`${day}T00:00:00Z`) / 1000;
const COLUMNS = [
  { title: "Requests", of: (row) => count(row.requests), number: true },
  { title: "Errors", of: (row) => count(row.errors), number: true, tone: (row) => row.errors > 0 && "bad" },
  { title: "Prompt tokens", of: (row) => count(row.tokens_prompt), number: true },
  { title: "Cached", of: (row) => count(row.tokens_cached), number: true },
  { title: "Generated", of: (row) => `${count(row.tokens_completion)}${row.tokens_estimated ? ` + ${count(row.tokens_estimated)} est.` : ""}`, number: true },
  { title: "Slot time", of: (row) => seconds(row.slot_s), number: true },
  { title: "Energy", of: (row) => energy(row.energy_j), number: true },
];

export default function Usage() {
  const [days, setDays] = useState(30);
  const [by, setBy] = useState("model");
  const since = lastDays(days);
  const byDay = useAnswer((signal) => get(`usage?by=day&since=${since}`, signal), [since], 60_000);
  const grouped = useAnswer((signal) => get(`usage?by=${by}&since=${since}`, signal), [since, by], 60_000);
  const shownBy = grouped.value?.by[0]; // not `by` before its answer has come
  // Each day has a bar, so that the last one is today; a day without requests has no row.
  const rowOf = new Map((byDay.value?.rows ?? []).map((row) => [secondsOf(row.day), row]));
  const first = secondsOf(byDay.value?.since);
  const times = Array.from({ length: byDay.value ? days : 0 }, (_, day) => first + day * DAY_S);
  const sumOf = (name) => times.map((time) => rowOf.get(time)?.[name] ?? 0);
  return html`<p class="fields">
      <label class="field"><span>Days</span><select value=${days} onChange=${(event) => setDays(Number(event.target.value))}>${[7, 30, 90, 365].map((number) => html`<option value=${number}>${number}</option>`)}</select></label>
      <label class="field"><span>By</span><select value=${by} onChange=${(event) => setBy(event.target.value)}>${["model", "key", "day"].map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
    </p>
    <${Problem} error=${byDay.error ?? grouped.error} />
    ${grouped.value?.problem && html`<${Problem} error=${{ message: grouped.value.problem }} />`}
    ${rowOf.size > 0 && html`<div class="charts">
      <${Chart} bars title="Generated tokens by day" times=${times} values=${sumOf("tokens_completion")} format=${count} markFormat=${mark} />
      <${Chart} bars title="Requests by day" times=${times} values=${sumOf("requests")} format=${count} markFormat=${mark} />
    </div>`}
    ${grouped.value && (grouped.value.rows.length === 0
      ? !grouped.value.problem && html`<p class="note">No requests in these days.</p>`
      : html`<${Table} columns=${[{ title: shownBy, of: (row) => row[shownBy] || UNKNOWN, head: true }, ...COLUMNS]} rows=${grouped.value.rows} idOf=${(row) => row[shownBy]} />`)}`;
}
