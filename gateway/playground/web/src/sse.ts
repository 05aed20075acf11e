// Server-sent events from a fetch: the browser's EventSource can neither POST nor send a key.

export interface ServerEvent {
  id: string;
  data: string;
  /** When the gateway had what the event tells, in seconds of this connection; null where it does not say. */
  serverS: number | null;
}

const SERVER_TIME = /^: server time ([\d.]+) s$/;

/** Ends with the body; an incomplete last event is dropped, and so are comments between events. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split("\n\n");
      rest = blocks.pop() ?? "";
      yield* blocks.map(parse).filter((event) => event.data !== "");
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function parse(block: string): ServerEvent {
  const event: ServerEvent = { id: "", data: "", serverS: null };
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
    const time = SERVER_TIME.exec(line)?.[1];
    if (time !== undefined) event.serverS = Number(time);
  }
  return event;
}
