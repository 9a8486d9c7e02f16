// The console: signs in, then shows the page that the fragment of the address names.
import { render } from "./vendor/preact.module.js";
import { useEffect, useState } from "./vendor/hooks.module.js";
import { onSignedOut, session, signIn, signOut } from "./api.js";
import { html } from "./html.js";
import { Problem, useStore } from "./parts.js";
import { SignIn } from "./pages/sign_in.js";
import { start, stop, update } from "./store.js";

const PAGES = {
  models: "Models",
  memory: "Memory",
  requests: "Requests",
  plan: "Plan",
  playground: "Playground",
  batches: "Batches",
  logs: "Logs",
  usage: "Usage",
  config: "Config",
};

// The text after # is `page` or `page/model`.
function whereabouts() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  let model = "";
  try {
    model = decodeURIComponent(rest.join("/"));
  } catch {
    // Not a valid name: no model is chosen.
  }
  return { name: Object.hasOwn(PAGES, name) ? name : "models", model };
}

function Console() {
  const { session, status, connected, error } = useStore();
  const [where, setWhere] = useState(whereabouts());
  const [loaded, setLoaded] = useState({ name: "", Page: null, error: null });
  useEffect(() => {
    const moved = () => setWhere(whereabouts());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(() => {
    let isCurrent = true;
    document.title = `${PAGES[where.name]} · llamasup`;
    import(`./pages/${where.name}.js`).then(
      (module) => isCurrent && setLoaded({ name: where.name, Page: module.default, error: null }),
      () => isCurrent && setLoaded({ name: where.name, Page: null, error: { message: "This page could not be loaded.", remedy: "Reload it." } }),
    );
    return () => (isCurrent = false);
  }, [where.name]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to content</a>
    <header>
      <strong>llamasup</strong>
      <nav aria-label="Pages">${Object.entries(PAGES).map(
        ([name, title]) => html`<a key=${name} href=${`#${name}`} aria-current=${name === where.name ? "page" : null}>${title}</a>`,
      )}</nav>
      <span class=${connected ? "link on" : "link off"} role="status">${connected ? "live" : "reconnecting"}</span>
      <button class="quiet" onClick=${() => signOut().then(begin)}>Sign out</button>
    </header>
    <main id="main" tabindex="-1" class=${connected ? null : "stale"}>
      <h1>${PAGES[where.name]}</h1>
      ${!connected && html`<${Problem} error=${error} />`}
      ${!connected && status && html`<p class="note">The states shown are not current.</p>`}
      ${loaded.name !== where.name || !session
        ? html`<p class="note">Loading…</p>`
        : loaded.Page ? html`<${loaded.Page} key=${where.name} model=${where.model} />` : html`<${Problem} error=${loaded.error} />`}
    </main>
    <footer>llamasup ${status?.version ?? ""}</footer>`;
}

const root = document.getElementById("app");
root.replaceChildren(); // the placeholder

function showSignIn(error) {
  stop();
  update({ session: null, connected: false, config: null, draft: null, applied: {} });
  document.title = "Sign in · llamasup";
  render(html`<${SignIn} error=${error} onSignedIn=${showConsole} />`, root);
}

function showConsole(opened) {
  update({ session: opened });
  start();
  render(html`<${Console} />`, root);
}

const TOKEN = "#token=";
let begun = 0;

async function begin() {
  const mine = ++begun; // a later one, with a token of its own, replaces it
  let refused = null;
  if (location.hash.startsWith(TOKEN)) {
    const token = location.hash.slice(TOKEN.length);
    history.replaceState(null, "", location.pathname); // it is valid only once
    try {
      const opened = await signIn({ token });
      if (mine === begun) showConsole(opened);
      return;
    } catch (error) {
      refused = error; // this browser may have a session all the same
    }
  }
  try {
    const known = await session();
    if (mine === begun) showConsole(known);
  } catch (error) {
    if (mine === begun) showSignIn(refused ?? error);
  }
}

onSignedOut(showSignIn);
addEventListener("hashchange", () => location.hash.startsWith(TOKEN) && begin());
begin();
