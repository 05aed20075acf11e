// The parts of the gateway's JSON that the page reads.

import type { Delta } from "./parts";

export type Origin = "target" | "accepted" | "corrected" | "bonus";

export interface Round {
  index: number;
  base_len: number;
  num_tokens: number;
  num_draft_tokens: number;
  num_accepted_tokens: number;
  method: string;
  drafter: string;
}

export interface Annotation {
  origins: Origin[];
  token_texts: string[];
  rounds: Round[];
}

interface CompletionLogprobs {
  token_logprobs: (number | null)[];
  top_logprobs: (Record<string, number> | null)[];
}

interface ChatLogprobs {
  content: { logprob: number; top_logprobs: { token: string; logprob: number }[] }[];
}

export interface Choice {
  text?: string;
  delta?: Delta;
  finish_reason: string | null;
  outrider?: Annotation;
  logprobs: CompletionLogprobs | ChatLogprobs | null;
}

/** What speculation came to in the whole answer. */
export interface Speculation {
  num_spec_steps: number;
  /** Against plain decoding, as the verifier estimates it; negative: it has cost time. */
  saved_ms: number;
}

export interface Chunk {
  choices: Choice[];
  /** With the usage, at the end; a gateway may be set to send none. */
  metrics?: { speculative_decoding: Speculation };
}

export interface ErrorDetail {
  message: string;
  type: string;
  param: string | null;
  code: number;
  /** Seconds, from the answer's Retry-After. */
  retryAfterS?: number;
}

export interface Model {
  id: string;
  max_model_len: number;
  draft_methods: string[];
  /** Whether it has a chat template. */
  chats: boolean;
  /** How it writes tool calls; "": no parser knows. */
  tool_call_parser: string;
}

export interface Verifier {
  address: string;
  healthy: boolean;
  model: string;
  device: string;
  dtype: string;
  num_sessions: number;
  max_sessions: number;
  num_waiting: number;
  num_blocks: number;
  num_free_blocks: number;
  /** The methods it drafts with in its own process. */
  methods: Method[];
  /** What its head has learned from what it serves; null: it does not learn. */
  learning: Learning | null;
}

/** tokens_before, tokens_after: expected a round at the last judgement; 0: none yet. refusal: of the last head refused. */
export interface Learning {
  num_tokens: number;
  num_taken: number;
  num_rolled_back: number;
  num_refused: number;
  tokens_before: number;
  tokens_after: number;
  refusal: string;
}

export interface Method {
  name: string;
  model: string;
  /** Of its weights; above 1: they were changed while serving. */
  version: number;
}

export interface Drafter {
  address: string;
  healthy: boolean;
  num_sessions: number;
  max_sessions: number;
  methods: Method[];
}

export interface Fleet {
  version: string;
  model: string | null;
  verifiers: Verifier[];
  drafters: Drafter[];
  /** failover_s: how long the gateway waits for a verifier. */
  gateway: { num_running: number; failover_s: number };
}

/** A token's log-probability under the target, and the likeliest tokens, from either of OpenAI's two formats. */
export interface Law {
  logprob: number | null;
  top: [string, number][];
}

export function lawsOf(logprobs: Choice["logprobs"]): Law[] {
  if (logprobs === null) return [];
  if ("content" in logprobs) {
    return logprobs.content.map((entry) => ({
      logprob: entry.logprob,
      top: entry.top_logprobs.map((other): [string, number] => [other.token, other.logprob]),
    }));
  }
  return logprobs.token_logprobs.map((logprob, index) => ({
    logprob,
    top: Object.entries(logprobs.top_logprobs[index] ?? {}).sort((one, other) => other[1] - one[1]),
  }));
}
