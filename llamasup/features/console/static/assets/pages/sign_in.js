import { useEffect, useState } from "../vendor/hooks.module.js";
import { signIn } from "../api.js";
import { html } from "../html.js";
import { Problem } from "../parts.js";

export function SignIn({ error, onSignedIn }) {
  const [failed, setFailed] = useState(error);
  const [isBusy, setIsBusy] = useState(false);
  useEffect(() => setFailed(error), [error]);
  const submit = async (event) => {
    event.preventDefault();
    const key = new FormData(event.target).get("key");
    setIsBusy(true);
    try {
      onSignedIn(await signIn({ key }));
    } catch (problem) {
      setFailed(problem);
    } finally {
      setIsBusy(false);
    }
  };
  return html`<main class="sign-in">
    <h1>Sign in to llamasup</h1>
    <p>Run <code>llamasup ui</code> on the machine of this llamasup. The command opens this page and signs the browser in.</p>
    ${failed.acceptsKey && html`<form onSubmit=${submit}>
      <label class="field"><span>Or enter an API key with the right “control”</span>
        <input type="password" name="key" autocomplete="off" required /></label>
      <button disabled=${isBusy}>Sign in</button>
    </form>`}
    ${!isBusy && html`<${Problem} error=${failed} />`}
  </main>`;
}
