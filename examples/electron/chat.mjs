// The pieces of text of a streamed answer.
import { createInterface } from "node:readline";
import { Readable } from "node:stream";

export async function* chat(url, messages) {
  const body = JSON.stringify({ messages, stream: true, max_tokens: 128 });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(`${url}/v1/chat/completions`, { method: "POST", headers, body });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  for await (const line of createInterface({ input: Readable.fromWeb(answer.body) })) {
    if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
    const event = JSON.parse(line.slice("data: ".length));
    if (event.error) throw new Error(event.error.message); // llama-server ended within the answer
    const text = event.choices?.[0]?.delta?.content;
    if (text) yield text;
  }
}
