// Requests to the gateway that served the page; addresses are relative, so that a path prefix in front of it does no harm.

import { events, type ServerEvent } from "./sse";
import type { ErrorDetail, Fleet, Model } from "./wire";

/** The gateway has answered, and says no. */
export class Refusal extends Error {
  constructor(readonly detail: ErrorDetail) {
    super(detail.message);
  }
}

export class Api {
  constructor(readonly key: string) {}

  async model(): Promise<Model> {
    const list = (await this.get("v1/models")) as { data: Model[] };
    const model = list.data[0];
    if (model === undefined) throw new Error("the gateway names no model");
    return model;
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
    return (await this.fetch(path, { signal: AbortSignal.timeout(10_000) })).json();
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
    return ((await answer.json()) as { error: ErrorDetail }).error;
  } catch {
    // Not the gateway's own words: a proxy's.
    return { message: answer.statusText || "no reason given", type: "", param: null, code: answer.status };
  }
}
