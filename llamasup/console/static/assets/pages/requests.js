import { useState } from "../vendor/hooks.module.js";
import { control } from "../api.js";
import { clock, count, percent, rate, seconds, UNKNOWN } from "../format.js";
import { html } from "../html.js";
import { Problem, useStore } from "../parts.js";

const SLOW_S = 10;

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
  const ended = onlySlow ? requests.ended.filter((request) => request.duration_s >= SLOW_S) : requests.ended;
  return html`<${Problem} error=${error} />
    <h2>Live (${count(requests.live.length)})</h2>
    ${requests.live.length === 0
      ? html`<p class="note">No request is in flight.</p>`
      : html`<div class="scroll"><table>
        <thead><tr><th>Model</th><th>Path</th><th>Phase</th><th class="number">Age</th><th class="number">Prompt</th><th class="number">Generated</th><th class="number">Speed</th><th>Client</th><th></th></tr></thead>
        <tbody>${requests.live.map((request) => html`<tr key=${request.id}>
          <th scope="row">${request.model ?? UNKNOWN}</th><td>${request.path}</td><td>${phaseText(request)}</td>
          <td class="number">${seconds(request.age_s)}</td><td class="number">${count(request.tokens_prompt)}</td>
          <td class="number">${count(request.tokens_completion)}</td><td class="number">${rate(request.tokens_per_s)}</td>
          <td>${request.key ?? (request.client || "socket")}</td>
          <td><button aria-label=${`Cancel request ${request.id}`} onClick=${() => cancel(request.id)}>Cancel</button></td>
        </tr>`)}</tbody></table></div>`}
    <h2>Finished</h2>
    ${requests.ended_total > requests.ended.length && html`<p class="note">${count(requests.ended_total)} requests have finished. The list has the last ${count(requests.ended.length)}, but at most 20 of each second.</p>`}
    <label class="check"><input type="checkbox" checked=${onlySlow} onChange=${(event) => setOnlySlow(event.target.checked)} /> Only those of ${SLOW_S} s or longer</label>
    ${ended.length === 0
      ? html`<p class="note">None yet.</p>`
      : html`<div class="scroll"><table>
        <thead><tr><th>Ended</th><th>Model</th><th>Path</th><th class="number">Status</th><th>Outcome</th><th class="number">Queue</th><th class="number">First byte</th><th class="number">Duration</th><th class="number">Prompt</th><th class="number">Cached</th><th class="number">Generated</th><th class="number">Speed</th></tr></thead>
        <tbody>${ended.map((request) => html`<tr key=${request.request_id + request.time} class=${request.duration_s >= SLOW_S ? "slow" : null}>
          <td>${clock(request.time)}</td><th scope="row">${request.model ?? UNKNOWN}</th><td>${request.path}</td>
          <td class=${`number ${request.status >= 400 ? "bad" : ""}`}>${request.status}</td><td>${request.outcome}</td>
          <td class="number">${seconds(request.queue_s)}</td><td class="number">${seconds(request.first_byte_s)}</td><td class="number">${seconds(request.duration_s)}</td>
          <td class="number">${count(request.tokens_prompt)}</td><td class="number">${count(request.tokens_cached)}</td>
          <td class="number">${count(request.tokens_completion)}</td><td class="number">${rate(request.tokens_per_s)}</td>
        </tr>`)}</tbody></table></div>`}`;
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
