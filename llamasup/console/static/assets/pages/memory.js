import { get } from "../api.js";
import { bytes } from "../format.js";
import { html } from "../html.js";
import { Problem, State, useAnswer } from "../parts.js";

const KINDS = ["weights", "kv", "compute", "cache"];
const NAMES = { weights: "Weights", kv: "KV cache", compute: "Compute", cache: "Prompt cache" };
const WIDTH = 1000;

export default function Memory() {
  const { value, error } = useAnswer((signal) => get("memory", signal), [], 3000);
  return html`<${Problem} error=${error} />
    <p class="legend">${KINDS.map((kind) => html`<span key=${kind}><svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect class=${`part ${kind}`} width="1" height="1" /></svg> ${NAMES[kind]}</span>`)}</p>
    ${value?.devices.map((device) => html`<${Device} key=${device.name} device=${device} />`)}`;
}

// The parts of the bar, each with its place and its width in thousandths of the device.
export function partsOf(device) {
  const needed = device.models.reduce((sum, model) => sum + (model.predicted?.total_bytes ?? 0), 0);
  const whole = Math.max(device.total_bytes ?? 0, needed, 1);
  const parts = [];
  let x = 0;
  for (const model of device.models) {
    for (const kind of KINDS) {
      const size = model.predicted?.[`${kind}_bytes`] ?? 0;
      if (size <= 0) continue;
      const width = (size / whole) * WIDTH;
      parts.push({ model: model.id, kind, size, x, width });
      x += width;
    }
  }
  return parts;
}

function Device({ device }) {
  const parts = partsOf(device);
  const title = device.name === "ram" ? "RAM" : device.name;
  return html`<section class="card">
    <h2>${title} <span class="note">${bytes(device.free_bytes)} free of ${bytes(device.total_bytes)}, budget ${bytes(device.budget_bytes)}</span></h2>
    <svg class="bar" viewBox=${`0 0 ${WIDTH} 24`} preserveAspectRatio="none" role="img" aria-label=${`${title}: predicted memory by model; the table has the numbers`}>
      <rect class="part free" width=${WIDTH} height="24" />
      ${parts.map((part) => html`<rect class=${`part ${part.kind}`} x=${part.x} width=${part.width} height="24"><title>${`${part.model}, ${NAMES[part.kind]}: ${bytes(part.size)}`}</title></rect>`)}
    </svg>
    ${device.models.length === 0
      ? html`<p class="note">No model uses it.</p>`
      : html`<div class="scroll"><table>
        <thead><tr><th>Model</th><th>State</th>${KINDS.map((kind) => html`<th class="number">${NAMES[kind]}</th>`)}<th class="number">Predicted</th><th class="number">Measured</th></tr></thead>
        <tbody>${device.models.map((model) => html`<tr key=${model.id}>
          <th scope="row">${model.id}</th><td><${State} state=${model.state} /></td>
          ${KINDS.map((kind) => html`<td class="number">${bytes(model.predicted?.[`${kind}_bytes`])}</td>`)}
          <td class="number">${bytes(model.predicted?.total_bytes)}</td><td class="number">${bytes(model.measured_bytes)}</td>
        </tr>`)}</tbody></table></div>`}
  </section>`;
}
