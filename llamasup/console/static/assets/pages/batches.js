import { useState } from "../vendor/hooks.module.js";
import { get, post } from "../api.js";
import { count, moment, percent, UNKNOWN } from "../format.js";
import { html } from "../html.js";
import { Problem, State, useAnswer } from "../parts.js";

const WAITING = ["validating", "in_progress"]; // those that can be cancelled

export default function Batches() {
  const [cancels, setCancels] = useState(0);
  const [error, setError] = useState(null);
  const answer = useAnswer((signal) => get("batches", signal), [cancels], 2_000);
  const cancel = async (id) => {
    setError(null);
    try {
      await post(`batches/${encodeURIComponent(id)}/cancel`);
    } catch (problem) {
      setError(problem);
    }
    setCancels((number) => number + 1);
  };
  const batches = answer.value?.batches;
  return html`<${Problem} error=${error ?? answer.error} />
    ${batches && (batches.length === 0
      ? html`<p class="note">No batch has been created.</p>`
      : html`<div class="scroll"><table class="batches">
        <thead><tr><th>Created</th><th>Client</th><th>Path</th><th>Status</th><th class="number">Lines</th><th class="number">Done</th><th class="number">Failed</th><th class="number">Percent</th><th>Ends by</th><th>Errors</th><th></th></tr></thead>
        <tbody>${batches.map((batch) => html`<${Row} key=${batch.id} batch=${batch} onCancel=${() => cancel(batch.id)} />`)}</tbody></table></div>`)}`;
}

function Row({ batch, onCancel }) {
  const { total, completed, failed } = batch.request_counts;
  const errors = batch.errors?.data ?? [];
  return html`<tr>
    <th scope="row" title=${batch.id}>${moment(batch.created_at)}</th><td>${batch.client || UNKNOWN}</td><td>${batch.endpoint}</td>
    <td><${State} state=${batch.status} /></td>
    <td class="number">${total ? count(total) : UNKNOWN}</td><td class="number">${count(completed)}</td>
    <td class=${`number ${failed ? "bad" : ""}`}>${count(failed)}</td>
    <td class="number">${total ? percent((100 * (completed + failed)) / total) : UNKNOWN}</td>
    <td>${moment(batch.expires_at)}</td><td>${errors.map((mistake) => html`<p>${mistake.line ? `line ${mistake.line}: ` : ""}${mistake.message}</p>`)}</td>
    <td>${WAITING.includes(batch.status) && html`<button aria-label=${`Cancel batch ${batch.id}`} onClick=${onCancel}>Cancel</button>`}</td>
  </tr>`;
}
