// What the pages show: one state, one stream of events. A hidden tab has no stream and asks for nothing.
import { control, eventsOf, get } from "./api.js";

const ENDED_KEPT = 200;
const STATUS_DELAY_MS = 250;
const STATUS_BUSY_MS = 5000; // while requests come and go, the status changes all the time
const ENDED_DELAY_MS = 2000;
const RETRY_MS = [500, 1000, 2000, 5000, 10000];

let state = { status: null, requests: { live: [], ended: [], ended_total: 0 }, connected: false, error: null, session: null, config: null, draft: null, applying: false, applied: {} };
const listeners = new Set();
let source = null;
let statusTimer = 0;
let statusDue = 0;
let statusRead = -Infinity;
let statusAsked = 0;
let statusShown = 0;
let requestsNews = 0;
let endedTimer = 0;
let retryTimer = 0;
let retries = 0;
let running = false;

export const current = () => state;

export function update(change) {
  state = { ...state, ...change };
  for (const listener of listeners) listener(state);
}

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function mergeEnded(known, news) {
  const ids = new Set(news.map((record) => record.request_id + record.time));
  return [...news, ...known.filter((record) => !ids.has(record.request_id + record.time))].slice(0, ENDED_KEPT);
}

export async function refreshStatus() {
  clearTimeout(statusTimer);
  statusTimer = 0;
  statusRead = performance.now();
  const mine = ++statusAsked;
  try {
    const status = await get("status");
    if (mine < statusShown) return; // a later question has its answer already
    statusShown = mine;
    update({ status, error: null });
  } catch (error) {
    if (mine > statusShown) update({ error });
  }
}

function statusSoon(delay = STATUS_DELAY_MS) {
  const due = performance.now() + delay;
  if (statusTimer && statusDue <= due) return;
  clearTimeout(statusTimer);
  statusDue = due;
  statusTimer = setTimeout(refreshStatus, delay);
}

// An event has only the last finished requests of a second. When there are no longer more of them, the list is read.
function readEndedSoon() {
  clearTimeout(endedTimer);
  endedTimer = setTimeout(() => {
    endedTimer = 0;
    readRequests(source);
  }, ENDED_DELAY_MS);
}

function take(event) {
  switch (event.event) {
    case "requests":
      requestsNews += 1;
      if (event.ended_total - state.requests.ended_total > event.ended.length) readEndedSoon();
      update({ requests: { live: event.live, ended: mergeEnded(state.requests.ended, event.ended), ended_total: event.ended_total } });
      statusSoon(Math.max(STATUS_DELAY_MS, statusRead + STATUS_BUSY_MS - performance.now()));
      break;
    case "progress":
      noteProgress(event);
      break;
    case "missed":
      reopen();
      break;
    default:
      statusSoon();
  }
}

function noteProgress({ model, percent, eta_s, elapsed_s, reason }) {
  if (!state.status) return;
  const models = state.status.models.map((known) =>
    known.id === model ? { ...known, load: { percent, eta_s, elapsed_s, reason } } : known,
  );
  update({ status: { ...state.status, models } });
}

async function open() {
  close();
  if (!running || document.hidden) return;
  const mine = new AbortController();
  source = mine;
  try {
    // Not an EventSource, which sends no header.
    const answer = await control("GET", "events?requests=1", { raw: true, signal: mine.signal });
    retries = 0;
    update({ connected: true });
    takeSnapshot(mine); // after the stream is open, so that nothing falls between the two
    for await (const data of eventsOf(answer)) {
      if (mine !== source) return;
      take(JSON.parse(data));
    }
  } catch (error) {
    if (mine === source) update({ error });
  }
  if (mine === source) reopen();
}

async function takeSnapshot(mine) {
  await refreshStatus();
  await readRequests(mine);
}

async function readRequests(mine) {
  const news = requestsNews;
  const before = new Set(state.requests.ended);
  try {
    const found = await get(`requests?ended=${ENDED_KEPT}`);
    if (mine !== source) return;
    // An event that came meanwhile is newer.
    const ended = mergeEnded(found.ended, state.requests.ended.filter((record) => !before.has(record)));
    update({ requests: news === requestsNews ? found : { ...state.requests, ended } });
  } catch (error) {
    if (mine === source) update({ error });
  }
}

function close() {
  clearTimeout(retryTimer);
  clearTimeout(statusTimer);
  clearTimeout(endedTimer);
  statusTimer = endedTimer = 0;
  source?.abort();
  source = null;
}

function reopen() {
  close();
  update({ connected: false });
  retryTimer = setTimeout(open, RETRY_MS[Math.min(retries++, RETRY_MS.length - 1)]);
}

export function start() {
  running = true;
  open();
}

export function stop() {
  running = false;
  close();
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
