// What the form holds, and the request that it makes.

export interface Turn {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Settings {
  kind: "prompt" | "chat";
  prompt: string;
  system: string;
  message: string;
  compare: boolean;
  inTurn: boolean;
  method: string;
  tree: boolean;
  mode: "" | "exact" | "rejection";
  /** Fields with a number, as typed; empty is the server's default. */
  numbers: Record<NumberField, string>;
  /** One stop string a line. */
  stop: string;
}

export type NumberField =
  | "num_speculative_tokens"
  | "max_tokens"
  | "temperature"
  | "seed"
  | "top_p"
  | "top_k"
  | "min_p"
  | "presence_penalty"
  | "frequency_penalty"
  | "repetition_penalty";

export const EXAMPLES: readonly { name: string; text: string }[] = [
  { name: "a class", text: 'class Config:\n    """Settings read from a file."""\n\n    def __init__(self, path):' },
  { name: "a function", text: 'import os\n\n\ndef walk(top):\n    """Yield every file below the folder."""' },
  { name: "a method", text: "class Stack:\n    def __init__(self):\n        self._items = []\n\n    def push(self, item):" },
];

const NO_NUMBERS: Record<NumberField, string> = {
  num_speculative_tokens: "",
  max_tokens: "160",
  temperature: "0.6",
  seed: "2",
  top_p: "",
  top_k: "",
  min_p: "",
  presence_penalty: "",
  frequency_penalty: "",
  repetition_penalty: "",
};

/** The likeliest to be right first. `auto` drafts only where it pays, which on a small machine shows little. */
const SHOWN_FIRST = ["eagle3", "eagle", "draft_model", "mlp_speculator", "medusa", "suffix", "ngram"];

/** The method that the page begins with. */
export function methodToShow(served: readonly string[]): string {
  return SHOWN_FIRST.find((name) => served.includes(name)) ?? "auto";
}

export const DEFAULTS: Settings = {
  kind: "prompt",
  prompt: EXAMPLES[0]?.text ?? "",
  system: "",
  message: "",
  compare: false,
  inTurn: false,
  method: "auto",
  tree: false,
  mode: "",
  numbers: NO_NUMBERS,
  stop: "",
};

/** How many of the likeliest tokens the page asks for, to show beside the one that was taken. */
const NUM_TOP = 3;

export function pathOf(settings: Settings): string {
  return settings.kind === "chat" ? "v1/chat/completions" : "v1/completions";
}

/** `method` overrides the form's: "off" for the other side of a comparison. */
export function bodyOf(settings: Settings, history: readonly Turn[], method = settings.method): object {
  const { num_speculative_tokens, ...sampling } = numbers(settings);
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  const input =
    settings.kind === "chat"
      ? { messages: [...systemOf(settings), ...history], logprobs: true, top_logprobs: NUM_TOP }
      : { prompt: settings.prompt, logprobs: NUM_TOP };
  return {
    ...input,
    ...sampling,
    ...(stop.length > 0 ? { stop } : {}),
    stream: true,
    speculation: {
      method,
      annotate: true,
      ...(settings.mode ? { mode: settings.mode } : {}),
      ...(method !== "off" && num_speculative_tokens !== undefined ? { num_speculative_tokens } : {}),
      ...(method !== "off" && settings.tree ? { token_tree: true } : {}),
    },
  };
}

/** Whether two runs must say the same: coupled to the target's own draws, not merely of its law. */
export function isReproducible(settings: Settings): boolean {
  if (settings.mode === "rejection") return false;
  const { temperature, seed } = numbers(settings);
  return temperature === 0 || (seed !== undefined && seed !== -1);
}

function systemOf(settings: Settings): Turn[] {
  return settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
}

function numbers(settings: Settings): Partial<Record<NumberField, number>> {
  const given = Object.entries(settings.numbers).filter(([, text]) => text.trim() !== "");
  return Object.fromEntries(given.map(([name, text]) => [name, Number(text)]));
}
