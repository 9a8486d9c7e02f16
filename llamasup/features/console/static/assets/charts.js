// Charts of the last hour and by day. The library is loaded when the first chart is shown.
import { useEffect, useRef, useState } from "./vendor/hooks.module.js";
import { bytes, count, dayOf, mark, rate, seconds, timeOfDay } from "./format.js";
import { html } from "./html.js";

const HEIGHT = 110;
const HOUR_S = 3600;
const DAY_S = 86_400;
const BINARY_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power); // so that marks are whole MiB
const DAY_STEPS = [1, 2, 7, 14, 30, 60, 90].map((days) => days * DAY_S);
// The series, its title, and the texts of its last value and of a mark of its axis.
const OF_HISTORY = [
  ["tokens_per_s", "Tokens per second", rate, mark],
  ["queued", "Waiting requests", mark, mark],
  ["first_byte_s", "Time to first byte", seconds, seconds],
  ["memory_bytes", "Memory", bytes, bytes],
];
const DARK = matchMedia("(prefers-color-scheme: dark)");
const PIXELS_BETWEEN_TIMES = 56;
const PIXELS_BETWEEN_VALUES = 26;
const AXIS_HEIGHT = 24;
const AXIS_WIDTH = 56;

export function History({ history }) {
  if (!history) return null;
  const { time, ...series } = history.series;
  const times = time.map((at) => Date.parse(at) / 1000);
  return html`<div class="charts" role="group" aria-label="The last hour">${OF_HISTORY.map(
    ([name, title, format, markFormat]) =>
      html`<${Chart} key=${name} title=${title} times=${times} values=${series[name] ?? []} format=${format} markFormat=${markFormat} />`,
  )}</div>`;
}

// Whether the system is dark now: a canvas does not follow the style sheet.
function useDark() {
  const [isDark, setIsDark] = useState(DARK.matches);
  useEffect(() => {
    const changed = () => setIsDark(DARK.matches);
    DARK.addEventListener("change", changed);
    return () => DARK.removeEventListener("change", changed);
  }, []);
  return isDark;
}

function shownTimes(times, bars) {
  const last = times.at(-1) ?? 0;
  return bars ? [(times[0] ?? 0) - DAY_S / 2, last + DAY_S / 2] : [last - HOUR_S, last];
}

export function Chart({ title, times, values, format, markFormat = format, bars = false }) {
  const isDark = useDark();
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
      const line = { stroke: colour("--line"), width: 1 };
      const axis = { stroke: colour("--muted"), grid: line, ticks: { ...line, size: 4 }, gap: 3, font: "11px system-ui" };
      plot.current = new UPlot(
        {
          width: place.current.clientWidth || 260,
          height: HEIGHT,
          legend: { show: false },
          tzDate: bars ? (at_s) => UPlot.tzDate(new Date(at_s * 1000), "Etc/UTC") : undefined, // days, as the page of the usage gives them
          cursor: { show: false },
          scales: { x: { range: () => shownTimes(data.current[0], bars) }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
          axes: [
            { ...axis, size: AXIS_HEIGHT, space: PIXELS_BETWEEN_TIMES, values: (_, marks) => marks.map(bars ? dayOf : timeOfDay), ...(bars ? { incrs: DAY_STEPS } : {}) },
            { ...axis, size: AXIS_WIDTH, space: PIXELS_BETWEEN_VALUES, ...(format === bytes ? { incrs: BINARY_STEPS } : {}), values: (_, marks) => marks.map(markFormat) },
          ],
          series: [{}, { stroke: colour("--accent"), width: 1.5, fill: colour("--fill"), points: { show: false },
            paths: bars ? UPlot.paths.bars({ size: [0.7, 40] }) : undefined }],
        },
        data.current,
        place.current,
      );
      observer = new ResizeObserver(() => plot.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
      observer.observe(place.current);
    }, () => {}); // without the library, the number of each chart is all that is shown
    return () => {
      isShown = false;
      observer?.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, [isDark]);
  useEffect(() => plot.current?.setData([times, values]), [times, values]);
  const shown = bars ? values.reduce((sum, value) => sum + value, 0) : values.findLast((value) => value != null);
  return html`<figure class="chart"><figcaption>${title} <strong>${format(shown)}</strong></figcaption>
    <div ref=${place} aria-hidden="true"></div></figure>`;
}
