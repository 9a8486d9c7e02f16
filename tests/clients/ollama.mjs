// Calls of the npm package ollama, one after the other.
// Usage: node ollama.mjs MODULE URL KEY CALLS
// CALLS: JSON, [[METHOD, REQUEST, PIECES: abort after so many], …]. Prints what each call returned or threw.
const [module, host, key, calls] = process.argv.slice(2);
const { Ollama } = await import(module);
const client = new Ollama({ host, headers: { Authorization: `Bearer ${key}` } });
const results = [];
for (const [method, request, most = Infinity] of JSON.parse(calls)) {
  const pieces = [];
  try {
    const answer = await client[method](request);
    if (!request?.stream) {
      results.push({ answer });
      continue;
    }
    for await (const piece of answer) {
      pieces.push(piece);
      if (pieces.length >= most) client.abort();
    }
    results.push({ pieces });
  } catch (error) {
    results.push({ pieces, error: error.name, message: error.message, status: error.status_code });
  }
}
console.log(JSON.stringify(results));
