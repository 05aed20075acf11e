// The form's fields, and the request built from them.

export interface Turn {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Settings {
  kind: "prompt" | "chat";
  prompt: string;
  system: string;
  message: string;
  /** OpenAI's list of tools as typed; empty: none. */
  tools: string;
  mustCall: boolean;
  compare: boolean;
  /** Both sides of a comparison at once: they share the machine, so their speeds say less. */
  atOnce: boolean;
  /** Of several that the gateway lists; empty: the only one. */
  model: string;
  /** Of a completion where the form names no number: OpenAI's default of 16 would cut it. A chat has all the room. */
  completionTokens: number;
  /** Whether tokens show where they come from; a chat's answer is rendered text otherwise. */
  marks: { prompt: boolean; chat: boolean };
  method: string;
  tree: boolean;
  mode: "" | "exact" | "rejection";
  /** Number fields as typed; empty is the server's default. */
  numbers: Record<NumberField, string>;
  /** One stop string per line. */
  stop: string;
  /** What the answer will be, as far as it is known; drafts are taken from it. Empty: nothing is. */
  prediction: string;
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

/** Questions that a chat model of 135 million parameters answers. */
export const QUESTIONS: readonly { name: string; text: string }[] = [
  { name: "sleep", text: "Give me three tips for sleeping well." },
  { name: "gravity", text: "What is gravity?" },
  { name: "photosynthesis", text: "Explain photosynthesis in one sentence." },
];

export const EXAMPLE_TOOLS = `[{"type": "function", "function": {
  "name": "get_weather",
  "parameters": {"type": "object", "properties": {
    "city": {"type": "string", "maxLength": 30},
    "unit": {"enum": ["celsius", "fahrenheit"]}
  }, "required": ["city", "unit"]}
}}]`;

const NO_NUMBERS: Record<NumberField, string> = {
  num_speculative_tokens: "",
  max_tokens: "",
  temperature: "0.6",
  seed: "2",
  top_p: "",
  top_k: "",
  min_p: "",
  presence_penalty: "",
  frequency_penalty: "",
  repetition_penalty: "",
};

export const DEFAULTS: Settings = {
  kind: "prompt",
  prompt: EXAMPLES[0]?.text ?? "",
  system: "",
  message: "",
  tools: "",
  mustCall: false,
  compare: false,
  atOnce: false,
  model: "",
  completionTokens: 16,
  marks: { prompt: true, chat: false },
  method: "auto",
  tree: false,
  mode: "",
  numbers: NO_NUMBERS,
  stop: "",
  prediction: "",
};

/** Likeliest tokens requested per position, to show with the chosen one. */
const NUM_TOP = 3;

export function pathOf(settings: Settings): string {
  return settings.kind === "chat" ? "v1/chat/completions" : "v1/completions";
}

/** `method` overrides the form's: "off" for the other side of a comparison. `seed` does so for another answer. */
export function bodyOf(settings: Settings, history: readonly Turn[], method = settings.method, seed?: number): object {
  const { num_speculative_tokens, ...given } = numbers(settings);
  const sampling = seed === undefined ? given : { ...given, seed };
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  const input =
    settings.kind === "chat"
      ? { messages: [...systemOf(settings), ...history], ...toolsOf(settings), logprobs: true, top_logprobs: NUM_TOP }
      : { prompt: settings.prompt, max_tokens: settings.completionTokens, logprobs: NUM_TOP };
  return {
    ...(settings.model ? { model: settings.model } : {}),
    ...input,
    ...sampling,
    ...(stop.length > 0 ? { stop } : {}),
    ...(settings.prediction !== "" ? { prediction: { type: "content", content: settings.prediction } } : {}),
    stream: true,
    stream_options: { include_usage: true },
    speculation: {
      method,
      annotate: true,
      ...(settings.mode ? { mode: settings.mode } : {}),
      ...(method !== "off" && num_speculative_tokens !== undefined ? { num_speculative_tokens } : {}),
      ...(method !== "off" && settings.tree ? { token_tree: true } : {}),
    },
  };
}

/** Whether two runs must be identical, not merely equal in distribution. */
export function isReproducible(settings: Settings): boolean {
  if (settings.mode === "rejection") return false;
  const { temperature, seed } = numbers(settings);
  return temperature === 0 || (seed !== undefined && seed !== -1);
}

/** Whether the tools can be sent; what they must be, the gateway says. */
export function areToolsJson(settings: Settings): boolean {
  try {
    toolsOf(settings);
    return true;
  } catch {
    return false;
  }
}

function toolsOf(settings: Settings): object {
  if (settings.tools.trim() === "") return {};
  const must = settings.mustCall ? { tool_choice: "required", parallel_tool_calls: false } : {};
  return { tools: JSON.parse(settings.tools) as unknown, ...must };
}

function systemOf(settings: Settings): Turn[] {
  return settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
}

function numbers(settings: Settings): Partial<Record<NumberField, number>> {
  const given = Object.entries(settings.numbers).filter(([, text]) => text.trim() !== "");
  return Object.fromEntries(given.map(([name, text]) => [name, Number(text)]));
}
