// Requests to the service, with the key where there is one. A 401 asks for a key and tries once more with it.

import { askForKey, currentKey } from "./key.js";

export class ApiError extends Error {
  /** Status 0 means no answer at all. */
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const NO_ANSWER = "the server does not answer";

export function headers(more = {}) {
  const key = currentKey();
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** The error in a body like {"error": {"message", "code"}}. */
export function errorFrom(status, body) {
  const error = body?.error ?? {};
  return new ApiError(status, error.message ?? `the server answered with status ${status}`, error.code ?? null);
}

/** The response if it is a success; else raises ApiError. */
export async function open(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const key = currentKey();
    const response = await request(path, { method, body, signal });
    if (response.ok) return response;
    const error = errorFrom(response.status, await response.json().catch(() => null));
    if (response.status !== 401) throw error;
    if (key === currentKey() && !(await askForKey())) throw error;
  }
}

async function request(path, { method, body, signal }) {
  const more = body === undefined ? {} : { "Content-Type": "application/json" };
  const sent = body === undefined ? undefined : JSON.stringify(body);
  try {
    return await fetch(path, { method, headers: headers(more), body: sent, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, NO_ANSWER);
  }
}

export async function call(method, path, body) {
  return (await open(path, { method, body })).json();
}
