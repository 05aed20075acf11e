// Requests to the gateway that served the page. URLs are relative, so a proxy may add a path prefix.

import { events, type ServerEvent } from "./sse";
import type { ErrorDetail, Fleet, Model } from "./wire";

/** The gateway's error answer. */
export class Refusal extends Error {
  constructor(readonly detail: ErrorDetail) {
    super(detail.message);
  }
}

export class Api {
  constructor(readonly key: string) {}

  /** At least one. */
  async models(): Promise<Model[]> {
    const list = (await this.get("v1/models")) as { data: Model[] };
    if (list.data.length === 0) throw new Error("the gateway lists no model");
    return list.data;
  }

  /** The API's documentation, relative to the page; "" where the gateway does not serve it. */
  async docs(): Promise<string> {
    const about = (await this.get("./")) as { docs?: string };
    return (about.docs ?? "").replace(/^\//, "");
  }

  async fleet(): Promise<Fleet> {
    return (await this.get("fleet")) as Fleet;
  }

  start(path: string, body: object, signal: AbortSignal): AsyncGenerator<ServerEvent> {
    const headers = { "content-type": "application/json" };
    return this.stream(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  /** The rest of a stream after the event with this id, from this gateway or another. */
  resume(lastEventId: string, signal: AbortSignal): AsyncGenerator<ServerEvent> {
    const requestId = lastEventId.slice(0, lastEventId.lastIndexOf(":"));
    return this.stream(`v1/streams/${requestId}`, { headers: { "last-event-id": lastEventId }, signal });
  }

  private async *stream(path: string, init: RequestInit): AsyncGenerator<ServerEvent> {
    const answer = await this.fetch(path, init);
    if (answer.body !== null) yield* events(answer.body);
  }

  private async get(path: string): Promise<unknown> {
    const headers = { accept: "application/json" };
    return (await this.fetch(path, { headers, signal: AbortSignal.timeout(10_000) })).json();
  }

  private async fetch(path: string, init: RequestInit): Promise<Response> {
    const headers = new Headers(init.headers);
    if (this.key) headers.set("authorization", `Bearer ${this.key}`);
    const answer = await fetch(path, { ...init, headers });
    if (!answer.ok) throw new Refusal(await detailOf(answer));
    return answer;
  }
}

async function detailOf(answer: Response): Promise<ErrorDetail> {
  try {
    const { error } = (await answer.json()) as { error: ErrorDetail };
    return { ...error, retryAfterS: Number(answer.headers.get("retry-after") ?? "") };
  } catch {
    // A proxy's answer, not the gateway's.
    return { message: answer.statusText || "no reason given", type: "", param: null, code: answer.status };
  }
}
