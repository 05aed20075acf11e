// One answer as it comes in: its text, its tokens by round, how fast. Not here: how it is drawn.

import { Refusal, type Api } from "./api";
import { lawsOf, type Chunk, type ErrorDetail, type Law, type Origin, type Round } from "./wire";

export interface Token extends Law {
  text: string;
  origin: Origin;
}

/** The tokens of one round. Replaced, never changed, so that what has been drawn is not drawn again. */
export interface Segment {
  round: Round;
  tokens: Token[];
  /** Index of its first token in the answer. */
  first: number;
}

/** Something that happened to the fleet while the answer was coming, before segment `at`. */
export interface Mark {
  at: number;
  text: string;
  gone: boolean;
}

export type Status = "waiting" | "streaming" | "resuming" | "done" | "stopped" | "failed";

export interface Failure {
  message: string;
  code: number | null;
  param: string | null;
}

const RATE_WINDOW_MS = 1000;
const RATE_STEP_MS = 100;
const RESUME_ATTEMPTS = 30;
const RESUME_PAUSE_MS = 1000;

export class Run {
  status: Status = "waiting";
  text = "";
  segments: Segment[] = [];
  marks: Mark[] = [];
  numTokens = 0;
  finishReason = "";
  failure: Failure | null = null;
  /** Tokens per second over the last second, with the seconds since the first token. */
  rates: { atS: number; perS: number }[] = [];
  private arrivals: { at: number; num: number }[] = [];
  private firstAt = 0;
  private lastAt = 0;
  private firstNum = 0;

  constructor(readonly speculates: boolean) {}

  get isOver(): boolean {
    return this.status === "done" || this.status === "stopped" || this.status === "failed";
  }

  /** Those with a draft. */
  get drafted(): Round[] {
    return this.segments.map((segment) => segment.round).filter((round) => round.num_draft_tokens > 0);
  }

  /** Tokens per round with a draft, as vLLM counts: what was accepted, and the one that the target adds. */
  get acceptanceLength(): number | null {
    const rounds = this.drafted;
    if (rounds.length === 0) return null;
    return 1 + rounds.reduce((sum, round) => sum + round.num_accepted_tokens, 0) / rounds.length;
  }

  get draftLength(): number | null {
    const rounds = this.drafted;
    if (rounds.length === 0) return null;
    return rounds.reduce((sum, round) => sum + round.num_draft_tokens, 0) / rounds.length;
  }

  /** From the first token to the last; what the prompt took does not count. */
  get tokensPerS(): number | null {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return seconds > 0 ? (this.numTokens - this.firstNum) / seconds : null;
  }

  tokenAt(index: number): { token: Token; segment: Segment } | null {
    const segment = this.segments.findLast((one) => one.first <= index);
    const token = segment?.tokens[index - segment.first];
    return segment && token ? { token, segment } : null;
  }

  count(origin: Origin): number {
    let sum = 0;
    for (const segment of this.segments) for (const token of segment.tokens) if (token.origin === origin) sum += 1;
    return sum;
  }

  add(chunk: Chunk, now: number): void {
    const choice = chunk.choices[0];
    if (choice === undefined) return; // the usage
    this.status = "streaming";
    this.text += choice.text ?? choice.delta?.content ?? "";
    if (choice.finish_reason !== null) this.finishReason = choice.finish_reason;
    const annotation = choice.outrider;
    const round = annotation?.rounds[0];
    if (annotation === undefined || round === undefined || annotation.token_texts.length === 0) return;
    const laws = lawsOf(choice.logprobs);
    const tokens = annotation.token_texts.map((text, place) => ({
      text,
      origin: annotation.origins[place] ?? "target",
      ...(laws[place] ?? { logprob: null, top: [] }),
    }));
    this.append(round, tokens);
    this.clock(tokens.length, now);
  }

  private append(round: Round, tokens: Token[]): void {
    const last = this.segments.at(-1);
    if (last !== undefined && last.round.index === round.index) {
      // The rest of a round, after a resumption in its midst.
      this.segments[this.segments.length - 1] = { ...last, tokens: [...last.tokens, ...tokens] };
    } else {
      this.segments.push({ round, tokens, first: this.numTokens });
    }
    this.numTokens += tokens.length;
  }

  private clock(num: number, now: number): void {
    if (this.firstAt === 0) {
      this.firstAt = now;
      this.firstNum = num;
    }
    this.lastAt = now;
    this.arrivals.push({ at: now, num });
    while ((this.arrivals[0]?.at ?? now) < now - RATE_WINDOW_MS) this.arrivals.shift();
    const atS = (now - this.firstAt) / 1000;
    const last = this.rates.at(-1);
    const windowMs = Math.min(RATE_WINDOW_MS, now - this.firstAt);
    if (windowMs < 2 * RATE_STEP_MS || (last !== undefined && atS - last.atS < RATE_STEP_MS / 1000)) return;
    // The tokens that open the window came before it.
    const inWindow = this.arrivals.slice(1).reduce((sum, arrival) => sum + arrival.num, 0);
    this.rates.push({ atS, perS: (1000 * inWindow) / windowMs });
  }
}

/** Runs a request to its end, whatever that is; never throws. A connection that breaks is taken up again. */
export async function follow(run: Run, api: Api, path: string, body: object, signal: AbortSignal, changed: () => void): Promise<void> {
  let lastId = "";
  let attemptsLeft = RESUME_ATTEMPTS;
  for (;;) {
    try {
      const stream = lastId ? api.resume(lastId, signal) : api.start(path, body, signal);
      for await (const event of stream) {
        if (event.data === "[DONE]") {
          run.status = "done";
          return changed();
        }
        const chunk = JSON.parse(event.data) as Chunk | { error: ErrorDetail };
        if ("error" in chunk) throw new Refusal(chunk.error);
        lastId = event.id || lastId;
        attemptsLeft = RESUME_ATTEMPTS;
        run.add(chunk, performance.now());
        changed();
      }
    } catch (error) {
      if (end(run, error, signal)) return changed();
    }
    if (lastId === "" || attemptsLeft === 0) {
      run.status = "failed";
      const message = lastId === "" ? "The gateway does not answer." : "The connection to the gateway is lost.";
      run.failure = { message, code: null, param: null };
      return changed();
    }
    attemptsLeft -= 1;
    run.status = "resuming";
    changed();
    await new Promise((resolve) => setTimeout(resolve, RESUME_PAUSE_MS));
  }
}

/** Whether the run is over with this error; a network that fails is none. */
function end(run: Run, error: unknown, signal: AbortSignal): boolean {
  if (signal.aborted) {
    run.status = "stopped";
    return true;
  }
  if (error instanceof Refusal) {
    // 503 to a resumption: the next gateway may be a moment away.
    if (run.status === "resuming" && error.detail.code === 503) return false;
    run.status = "failed";
    run.failure = { message: error.message, code: error.detail.code, param: error.detail.param };
    return true;
  }
  return false;
}
