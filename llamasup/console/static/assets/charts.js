// Charts of the last hour and by day. The library is loaded when the first chart is shown.
import { useEffect, useRef } from "./vendor/hooks.module.js";
import { bytes, count, rate, seconds } from "./format.js";
import { html } from "./html.js";

const HEIGHT = 110;
const HOUR_S = 3600;
const DAY_S = 86_400;
const BINARY_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power); // so that marks are whole MiB
const OF_HISTORY = [
  ["tokens_per_s", "Tokens per second", rate],
  ["queued", "Waiting requests", count],
  ["first_byte_s", "Time to first byte", seconds],
  ["memory_bytes", "Memory", bytes],
];

export function History({ history }) {
  if (!history) return null;
  const { time, ...series } = history.series;
  const times = time.map((at) => Date.parse(at) / 1000);
  return html`<div class="charts" role="group" aria-label="The last hour">${OF_HISTORY.map(
    ([name, title, format]) =>
      html`<${Chart} key=${name} title=${title} times=${times} values=${series[name] ?? []} format=${format} />`,
  )}</div>`;
}

export function Chart({ title, times, values, format, bars = false }) {
  const place = useRef(null);
  const plot = useRef(null);
  const data = useRef(null);
  data.current = [times, values];
  useEffect(() => {
    let isShown = true;
    let observer;
    import("./vendor/uPlot.esm.js").then(({ default: UPlot }) => {
      if (!isShown) return;
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(name).trim();
      const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
      plot.current = new UPlot(
        {
          width: place.current.clientWidth || 260,
          height: HEIGHT,
          legend: { show: false },
          cursor: { show: false },
          scales: { x: { range: (_, low, high) => (bars ? [low - DAY_S, high + DAY_S] : [high - HOUR_S, high]) }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
          axes: [axis, { ...axis, size: 72, ...(format === bytes ? { incrs: BINARY_STEPS } : {}), values: (_, marks) => marks.map(format) }],
          series: [{}, { stroke: colour("--accent"), width: 1.5, fill: colour("--fill"), points: { show: false },
            paths: bars ? UPlot.paths.bars({ size: [0.7, 40] }) : undefined }],
        },
        data.current,
        place.current,
      );
      observer = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
      observer.observe(place.current);
    });
    return () => {
      isShown = false;
      observer?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => plot.current?.setData([times, values]), [times, values]);
  const last = values.findLast((value) => value != null);
  return html`<figure class="chart"><figcaption>${title} <strong>${format(last)}</strong></figcaption>
    <div ref=${place} aria-hidden="true"></div></figure>`;
}
