import { useState } from "../vendor/hooks.module.js";
import { get } from "../api.js";
import { Chart } from "../charts.js";
import { count, energy, mark, seconds, UNKNOWN } from "../format.js";
import { html } from "../html.js";
import { Problem, useAnswer } from "../parts.js";

// A day begins at the local midnight of llamasup, which may be in another time zone than the browser.
const lastDays = (days) => `${days - 1}d`;

export default function Usage() {
  const [days, setDays] = useState(30);
  const [by, setBy] = useState("model");
  const since = lastDays(days);
  const byDay = useAnswer((signal) => get(`usage?by=day&since=${since}`, signal), [since], 60_000);
  const grouped = useAnswer((signal) => get(`usage?by=${by}&since=${since}`, signal), [since, by], 60_000);
  const shownBy = grouped.value?.by[0]; // not `by` before its answer has come
  const rows = [...(byDay.value?.rows ?? [])].sort((one, other) => (one.day < other.day ? -1 : 1));
  const times = rows.map((row) => Date.parse(`${row.day}T00:00:00Z`) / 1000);
  return html`<p class="fields">
      <label class="field"><span>Days</span><select value=${days} onChange=${(event) => setDays(Number(event.target.value))}>${[7, 30, 90, 365].map((number) => html`<option value=${number}>${number}</option>`)}</select></label>
      <label class="field"><span>By</span><select value=${by} onChange=${(event) => setBy(event.target.value)}>${["model", "key", "day"].map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
    </p>
    <${Problem} error=${byDay.error ?? grouped.error} />
    ${grouped.value?.problem && html`<${Problem} error=${{ message: grouped.value.problem }} />`}
    ${rows.length > 0 && html`<div class="charts">
      <${Chart} bars title="Generated tokens by day" times=${times} values=${rows.map((row) => row.tokens_completion)} format=${count} markFormat=${mark} />
      <${Chart} bars title="Requests by day" times=${times} values=${rows.map((row) => row.requests)} format=${count} markFormat=${mark} />
    </div>`}
    ${grouped.value && (grouped.value.rows.length === 0
      ? !grouped.value.problem && html`<p class="note">No requests in these days.</p>`
      : html`<div class="scroll"><table>
        <thead><tr><th>${shownBy}</th><th class="number">Requests</th><th class="number">Errors</th><th class="number">Prompt tokens</th><th class="number">Cached</th><th class="number">Generated</th><th class="number">Slot time</th><th class="number">Energy</th></tr></thead>
        <tbody>${grouped.value.rows.map((row) => html`<tr key=${row[shownBy]}>
          <th scope="row">${row[shownBy] || UNKNOWN}</th><td class="number">${count(row.requests)}</td><td class=${`number ${row.errors ? "bad" : ""}`}>${count(row.errors)}</td>
          <td class="number">${count(row.tokens_prompt)}</td><td class="number">${count(row.tokens_cached)}</td><td class="number">${count(row.tokens_completion)}${row.tokens_estimated ? ` + ${count(row.tokens_estimated)} est.` : ""}</td>
          <td class="number">${seconds(row.slot_s)}</td><td class="number">${energy(row.energy_j)}</td></tr>`)}</tbody></table></div>`)}`;
}
