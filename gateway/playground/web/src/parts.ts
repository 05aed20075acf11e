// Which part of a chat's answer a token belongs to: reasoning, text, a tool call, or the markers around them.

export type Kind = "reasoning" | "text" | "call";

export interface Delta {
  content?: string;
  reasoning?: string;
  reasoning_content?: string;
  tool_calls?: { index: number; function: { name?: string; arguments: string } }[];
}

export interface Call {
  name: string;
  arguments: string;
}

export interface Part {
  kind: Kind;
  /** Not part of what the gateway made of it: a marker, or a name that the call shows. */
  isMarkup: boolean;
}

/** Reads one choice's deltas, each with its tokens, in order. */
export class Parts {
  reasoning = "";
  calls: Call[] = [];
  private kind: Kind = "text";

  /** The part of each token. The gateway holds back what may be a marker, so a token can come before its text. */
  add(delta: Delta, texts: readonly string[]): Part[] {
    const found = this.read(delta);
    return texts.map((text) => {
      const holder = found.find((piece) => piece.text.includes(text.trim() || text));
      // Only in a chunk of several parts can a token's own text say which.
      if (holder !== undefined) this.kind = holder.kind;
      else if (found[0] !== undefined) this.kind = found[0].kind;
      // A blank that is held back belongs to text, but for those around a call.
      const isBlank = text.trim() === "" && (found.length > 0 || this.kind !== "call");
      return { kind: this.kind, isMarkup: holder === undefined && !isBlank };
    });
  }

  private read(delta: Delta): { kind: Kind; text: string }[] {
    const found: { kind: Kind; text: string }[] = [];
    const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
    this.reasoning += reasoning;
    if (reasoning) found.push({ kind: "reasoning", text: reasoning });
    if (delta.content) found.push({ kind: "text", text: delta.content });
    for (const { index, function: told } of delta.tool_calls ?? []) {
      const call = (this.calls[index] ??= { name: "", arguments: "" });
      call.name += told.name ?? "";
      call.arguments += told.arguments;
      found.push({ kind: "call", text: told.arguments });
    }
    return found;
  }
}
