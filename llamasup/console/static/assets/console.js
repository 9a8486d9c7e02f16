// Signs in with the token of the address, and shows the name of the session.
const main = document.getElementById("main");
const token = new URLSearchParams(location.hash.slice(1)).get("token");
if (token) {
  history.replaceState(null, "", location.pathname);
  await fetch("/llamasup/v1/console/session", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Llamasup-Console": "1" },
    body: JSON.stringify({ token }),
  });
}
const answer = await fetch("/llamasup/v1/console/session");
const shown = await answer.json();
main.textContent = answer.ok ? `Signed in as ${shown.name}` : shown.error.message;
