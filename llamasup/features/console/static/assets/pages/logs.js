import { useEffect, useRef, useState } from "../vendor/hooks.module.js";
import { control, modelPath } from "../api.js";
import { plainText } from "../format.js";
import { html } from "../html.js";
import { ModelChoice, Problem, useStore } from "../parts.js";

const OWN = "llamasup itself";
const LINES = 500;
const RETRY_MS = 3000;
const KEPT_CHARACTERS = 500_000;

export default function Logs({ model }) {
  const { status } = useStore();
  const models = status?.models ?? [];
  const [own, setOwn] = useState(false);
  const first = useRef(""); // stays when another model becomes ready
  if (!models.some((known) => known.id === first.current)) {
    first.current = (models.find((known) => known.state === "ready") ?? models[0])?.id ?? "";
  }
  const chosen = own ? "" : model || first.current;
  const choose = (id) => {
    setOwn(!id);
    if (id) location.hash = `#logs/${encodeURIComponent(id)}`;
  };
  return html`<${ModelChoice} label="Model" models=${models} value=${chosen} empty=${OWN} onChange=${choose} />
    <${Log} key=${chosen} model=${chosen} />`;
}

function Log({ model }) {
  const [text, setText] = useState("");
  const [error, setError] = useState(null);
  const [follows, setFollows] = useState(true);
  const place = useRef(null);
  useEffect(() => {
    let abort = new AbortController();
    let timer = 0;
    const follow = async () => {
      abort.abort();
      clearTimeout(timer);
      if (document.hidden) return;
      abort = new AbortController();
      const mine = abort;
      let kept = "";
      try {
        const answer = await control("GET", (model ? modelPath(model, "logs") : "logs") + `?lines=${LINES}&follow=1`, { raw: true, signal: mine.signal });
        // Invalid UTF-8 becomes a replacement character. The raw text is kept, so an escape cut in two is still found.
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        for (;;) {
          const { done, value } = await reader.read();
          if (done || mine.signal.aborted) break;
          kept = (kept + value).slice(-KEPT_CHARACTERS);
          setText(plainText(kept));
          setError(null);
        }
      } catch (problem) {
        if (!mine.signal.aborted) setError(problem);
      }
      // The log may begin later, and llamasup may start again.
      if (!mine.signal.aborted) timer = setTimeout(follow, RETRY_MS);
    };
    follow();
    document.addEventListener("visibilitychange", follow);
    return () => {
      abort.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", follow);
    };
  }, [model]);
  useEffect(() => {
    if (follows && place.current) place.current.scrollTop = place.current.scrollHeight;
  }, [text, follows]);
  return html`<label class="check"><input type="checkbox" checked=${follows} onChange=${(event) => setFollows(event.target.checked)} /> Scroll to the newest line</label>
    <${Problem} error=${error} />
    <pre class="log" ref=${place} tabindex="0" role="log" aria-label=${`Log of ${model || OWN}`}>${text}</pre>`;
}
