// Server-sent events from a fetch: the browser's own EventSource can neither POST nor send a key.

export interface ServerEvent {
  id: string;
  data: string;
}

/** Ends with the body, whether or not the last event was complete: half an event is dropped. */
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
      for (const block of blocks) yield parse(block);
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

function parse(block: string): ServerEvent {
  const event = { id: "", data: "" };
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}
