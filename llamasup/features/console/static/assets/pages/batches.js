import { useState } from "../vendor/hooks.module.js";
import { get, post } from "../api.js";
import { count, moment, percent, UNKNOWN } from "../format.js";
import { html } from "../html.js";
import { Problem, State, Table, useAnswer } from "../parts.js";

const WAITING = ["validating", "in_progress"]; // those that can be cancelled
const COLUMNS = [
  { title: "Created", of: (batch) => html`<span title=${batch.id}>${moment(batch.created_at)}</span>`, head: true },
  { title: "Client", of: (batch) => batch.client || UNKNOWN },
  { title: "Path", of: (batch) => batch.endpoint },
  { title: "Status", of: (batch) => html`<${State} state=${batch.status} />` },
  { title: "Lines", of: ({ request_counts: { total } }) => (total ? count(total) : UNKNOWN), number: true },
  { title: "Done", of: ({ request_counts: { completed } }) => count(completed), number: true },
  { title: "Failed", of: ({ request_counts: { failed } }) => count(failed), number: true, tone: (batch) => batch.request_counts.failed > 0 && "bad" },
  { title: "Percent", of: ({ request_counts: { total, completed, failed } }) => (total ? percent((100 * (completed + failed)) / total) : UNKNOWN), number: true },
  { title: "Expires", of: (batch) => moment(batch.expires_at) },
  { title: "Errors", of: (batch) => (batch.errors?.data ?? []).map((mistake) => html`<p>${mistake.line ? `line ${mistake.line}: ` : ""}${mistake.message}</p>`) },
];

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
  const cancelled = {
    title: "",
    of: ({ id, status }) => WAITING.includes(status) && html`<button aria-label=${`Cancel batch ${id}`} onClick=${() => cancel(id)}>Cancel</button>`,
  };
  const batches = answer.value?.batches;
  return html`<${Problem} error=${error ?? answer.error} />
    ${batches && (batches.length === 0
      ? html`<p class="note">No batch has been created.</p>`
      : html`<${Table} name="batches" columns=${[...COLUMNS, cancelled]} rows=${batches} idOf=${(batch) => batch.id} />`)}`;
}
