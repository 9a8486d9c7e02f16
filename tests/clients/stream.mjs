// What the script of a web page does: fetch, read the body's stream, take the events apart. (EventSource itself
// only sends GET, without headers; llama-server streams nothing to that.)
// Usage: node stream.mjs URL KEY BODY [PIECES: leave after so many]
const [url, key, body, most = "Infinity"] = process.argv.slice(2);
const leaving = new AbortController();
const pieces = [];
let ended = "broken off";
try {
  const response = await fetch(url, {
    method: "POST",
    headers: { "Content-Type": "application/json", Authorization: `Bearer ${key}` },
    body,
    signal: leaving.signal,
  });
  if (!response.ok) {
    console.log(JSON.stringify({ status: response.status, error: (await response.json()).error.message }));
    process.exit(0);
  }
  let unread = "";
  read: for await (const text of response.body.pipeThrough(new TextDecoderStream())) {
    const blocks = (unread + text).split("\n\n");
    unread = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") {
        ended = "done";
        break read;
      }
      const piece = JSON.parse(data).choices?.[0]?.delta?.content;
      if (piece) pieces.push(piece);
      if (pieces.length >= Number(most)) leaving.abort();
    }
  }
} catch (error) {
  ended = error.name;
}
console.log(JSON.stringify({ text: pieces.join(""), pieces: pieces.length, ended }));
