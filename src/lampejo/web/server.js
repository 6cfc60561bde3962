// The server: requests, answers as they come, and what went wrong in words that help.

import { t } from "./strings.js";

const KEY = "lampejo.key";
let keyHere = "";

// Kept until the tab is closed, never with the conversations.
export const apiKey = {
  get: () => {
    try {
      return sessionStorage.getItem(KEY) ?? keyHere;
    } catch {
      return keyHere;
    }
  },
  set: (value) => {
    keyHere = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      // It lives in this page alone then.
    }
  },
};

export class ServerError extends Error {
  constructor(status, message, seconds = null) {
    super(message);
    this.status = status;
    this.seconds = seconds; // after which to come back
  }

  // What to do about it.
  get remedy() {
    if (this.status === 0) return t("remedyUnreachable");
    if (this.status === 401 || this.status === 403) return t("remedyKey");
    if (this.status === 404) return t("remedyModel");
    if (this.status === 413) return t("remedyLong");
    if (this.status === 429) return this.seconds ? t("remedyBusyFor", this.seconds) : t("remedyBusy");
    if (this.status === 503) return t("remedyUnavailable");
    if (this.status >= 500) return t("remedyBroken");
    return t("remedyRequest");
  }
}

async function send(path, body, signal) {
  const headers = { Accept: body ? "text/event-stream" : "application/json" };
  if (body) headers["Content-Type"] = "application/json";
  const key = apiKey.get();
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, t("unreachable"));
  }
  if (response.ok) return response;
  const text = await response.text().catch(() => "");
  let message = "";
  try {
    const told = JSON.parse(text);
    message = told.error?.message ?? told.message ?? told.detail ?? "";
  } catch {
    // Not from lampejo, a proxy maybe; its page says nothing to anybody.
  }
  if (typeof message !== "string" || !message) message = t("status", response.status);
  throw new ServerError(response.status, message, parseInt(response.headers.get("Retry-After"), 10) || null);
}

// The first model's card.
export async function modelCard() {
  const response = await send("v1/models");
  return (await response.json()).data?.[0] ?? null;
}

// The data of server-sent events, however the network cut them.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      rest = (rest + value).replace(/\r\n/g, "\n");
      const parts = rest.split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chunks of one answer. Ends by itself only when the server says so; a stream that breaks off is an error.
export async function* chat(body, signal) {
  const response = await send(
    "v1/chat/completions",
    { ...body, stream: true, stream_options: { include_usage: true } },
    signal,
  );
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.status ?? 500, chunk.error.message ?? t("status", 500));
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ServerError || error.name === "AbortError" || signal?.aborted) throw error;
  }
  throw new ServerError(0, t("brokenOff"));
}
