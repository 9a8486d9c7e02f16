import { useState } from "../vendor/hooks.module.js";
import { control } from "../api.js";
import { clock, count, percent, rate, seconds, UNKNOWN } from "../format.js";
import { html } from "../html.js";
import { Problem, Table, useStore } from "../parts.js";

const SLOW_S = 10;
const LIVE = [
  { title: "Model", of: (request) => request.model ?? UNKNOWN, head: true },
  { title: "Path", of: (request) => request.path },
  { title: "Phase", of: phaseText },
  { title: "Age", of: (request) => seconds(request.age_s), number: true },
  { title: "Prompt", of: (request) => count(request.tokens_prompt), number: true },
  { title: "Generated", of: (request) => count(request.tokens_completion), number: true },
  { title: "Speed", of: (request) => rate(request.tokens_per_s), number: true },
  { title: "Client", of: clientOf },
];
const FINISHED = [
  { title: "Ended", of: (request) => clock(request.time) },
  { title: "Model", of: (request) => request.model ?? UNKNOWN, head: true },
  { title: "Path", of: (request) => request.path },
  { title: "Client", of: clientOf },
  { title: "Status", of: (request) => request.status, number: true, tone: ({ status }) => status >= 400 && "bad" },
  { title: "Outcome", of: (request) => request.cause ?? request.outcome, tone: (request) => request.cause && "bad" },
  { title: "Queue", of: (request) => seconds(request.queue_s), number: true },
  { title: "First byte", of: (request) => seconds(request.first_byte_s), number: true },
  { title: "Duration", of: (request) => seconds(request.duration_s), number: true },
  { title: "Prompt", of: (request) => count(request.tokens_prompt), number: true },
  { title: "Cached", of: (request) => count(request.tokens_cached), number: true },
  { title: "Generated", of: (request) => count(request.tokens_completion), number: true },
  { title: "Speed", of: (request) => rate(request.tokens_per_s), number: true },
];

export default function Requests() {
  const { requests } = useStore();
  const [onlySlow, setOnlySlow] = useState(false);
  const [error, setError] = useState(null);
  const cancel = async (id) => {
    setError(null);
    try {
      await control("DELETE", `requests/${encodeURIComponent(id)}`);
    } catch (problem) {
      if (problem.status !== 404) setError(problem); // it ended in the meantime
    }
  };
  const cancelled = {
    title: "",
    of: ({ id }) => html`<button aria-label=${`Cancel request ${id}`} onClick=${() => cancel(id)}>Cancel</button>`,
  };
  const ended = onlySlow ? requests.ended.filter((request) => request.duration_s >= SLOW_S) : requests.ended;
  return html`<${Problem} error=${error} />
    <h2>Live (${count(requests.live.length)})</h2>
    ${requests.live.length === 0
      ? html`<p class="note">No request is in flight.</p>`
      : html`<${Table} columns=${[...LIVE, cancelled]} rows=${requests.live} idOf=${(request) => request.id} />`}
    <h2>Finished</h2>
    ${requests.ended_total > requests.ended.length && html`<p class="note">${count(requests.ended_total)} requests have finished. The list has the last ${count(requests.ended.length)}, but at most 20 of each second.</p>`}
    <label class="check"><input type="checkbox" checked=${onlySlow} onChange=${(event) => setOnlySlow(event.target.checked)} /> Only requests of ${SLOW_S} s or longer</label>
    ${ended.length === 0
      ? html`<p class="note">None yet.</p>`
      : html`<${Table} columns=${FINISHED} rows=${ended} idOf=${(request) => request.request_id + request.time} toneOf=${(request) => (request.duration_s >= SLOW_S ? "slow" : null)} />`}`;
}

function phaseText(request) {
  const details = [
    request.position && `place ${request.position}`,
    request.percent != null && percent(request.percent),
    request.eta_s != null && `about ${seconds(request.eta_s)} left`,
    request.eta_s == null && request.expected_wait_s != null && `about ${seconds(request.expected_wait_s)} to wait`,
  ].filter(Boolean);
  return details.length ? `${request.phase} (${details.join(", ")})` : request.phase;
}

function clientOf({ key, client }) {
  return key || client || "socket";
}
