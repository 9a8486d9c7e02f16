import { get } from "../api.js";
import { bytes } from "../format.js";
import { html } from "../html.js";
import { Problem, State, Table, useAnswer } from "../parts.js";

const KINDS = ["weights", "kv", "compute", "cache"];
const NAMES = { weights: "Weights", kv: "KV cache", compute: "Compute", cache: "Prompt cache" };
const LEGEND = { ...NAMES, measured: "Measured", others: "Other programs", free: "Free" };
const WIDTH = 1000;
const COLUMNS = [
  { title: "Model", of: (model) => model.id, head: true },
  { title: "State", of: (model) => html`<${State} state=${model.state} />` },
  ...KINDS.map((kind) => ({ title: NAMES[kind], of: (model) => bytes(model.predicted?.[`${kind}_bytes`]), number: true })),
  { title: "Predicted", of: (model) => bytes(model.predicted?.total_bytes), number: true },
  { title: "Measured", of: (model) => bytes(model.measured_bytes), number: true },
];

export default function Memory() {
  const { value, error } = useAnswer((signal) => get("memory", signal), [], 3000);
  return html`<${Problem} error=${error} />
    <p class="legend">${Object.entries(LEGEND).map(([kind, name]) => html`<span key=${kind}><svg class="swatch" viewBox="0 0 1 1" aria-hidden="true"><rect class=${`part ${kind}`} width="1" height="1" /></svg> ${name}</span>`)}</p>
    ${value?.devices.map((device) => html`<${Device} key=${device.name} device=${device} />`)}`;
}

// What the programs that are not ours hold. A model that was not measured counts as predicted.
function othersOf({ total_bytes, free_bytes, models }) {
  const ours = models.reduce((sum, model) => sum + (model.measured_bytes ?? model.predicted?.total_bytes ?? 0), 0);
  return free_bytes == null ? 0 : Math.max(0, (total_bytes ?? 0) - free_bytes - ours);
}

// The parts of both bars, each with its place and its width in thousandths of the device. What is left is free.
export function barsOf(device) {
  const others = { kind: "others", size: othersOf(device) };
  const predicted = device.models.flatMap((model) =>
    KINDS.map((kind) => ({ model: model.id, kind, size: model.predicted?.[`${kind}_bytes`] ?? 0 })),
  );
  const measured = device.models.map((model) => ({ model: model.id, kind: "measured", size: model.measured_bytes ?? 0 }));
  const bars = { predicted: [...predicted, others], measured: [...measured, others] };
  const sums = Object.values(bars).map((parts) => parts.reduce((sum, part) => sum + part.size, 0));
  const whole = Math.max(device.total_bytes ?? 0, ...sums, 1);
  return Object.fromEntries(Object.entries(bars).map(([name, parts]) => [name, placed(parts, whole)]));
}

function placed(parts, whole) {
  let x = 0;
  return parts.filter((part) => part.size > 0).map((part) => {
    const width = (part.size / whole) * WIDTH;
    x += width;
    return { ...part, x: x - width, width };
  });
}

function Device({ device }) {
  const bars = barsOf(device);
  const title = device.name === "ram" ? "RAM" : device.name;
  return html`<section class="card">
    <h2>${title} <span class="note">${bytes(device.free_bytes)} free of ${bytes(device.total_bytes)}, budget ${bytes(device.budget_bytes)}</span></h2>
    ${Object.entries(bars).map(([name, parts]) => html`<svg key=${name} class=${`bar ${name}`} viewBox=${`0 0 ${WIDTH} 1`} preserveAspectRatio="none" role="img" aria-label=${`${title}: ${name} memory by model; the table has the numbers`}>
      <rect class="part free" width=${WIDTH} height="1" />
      ${parts.map((part) => html`<rect class=${`part ${part.kind}`} x=${part.x} width=${part.width} height="1"><title>${`${[part.model, LEGEND[part.kind]].filter(Boolean).join(", ")}: ${bytes(part.size)}`}</title></rect>`)}
    </svg>`)}
    ${device.models.length === 0
      ? html`<p class="note">No model uses this memory.</p>`
      : html`<${Table} columns=${COLUMNS} rows=${device.models} idOf=${(model) => model.id} />`}
  </section>`;
}
