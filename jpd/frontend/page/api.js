// Calls to the server the page came from: the API key, failures as text, server-sent events.

const KEY = "jpd-api-key";

export class KeyNeeded extends Error {}

// Kept for this tab only.
export function keepKey(key) {
  sessionStorage.setItem(KEY, key);
}

export function hasKey() {
  return sessionStorage.getItem(KEY) !== null;
}

// A response that is good. Throws KeyNeeded, or an Error with the server's own words.
export async function call(path, { body, signal } = {}) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  const response = await fetch(path, { ...options, headers, signal });
  if (response.ok) return response;
  const message = await failure(response);
  throw response.status === 401 ? new KeyNeeded(message) : new Error(message);
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// The data of each event of a stream, as text.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}
