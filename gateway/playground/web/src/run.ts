// One answer as it streams in: text, tokens by round, speed. Not here: how it is drawn.

import { Refusal, type Api } from "./api";
import { Parts, type Call, type Part } from "./parts";
import { lawsOf, type Chunk, type ErrorDetail, type Law, type Origin, type Round, type Speculation } from "./wire";

export interface Token extends Law, Part {
  text: string;
  origin: Origin;
}

/** The tokens of one round. Immutable, so that unchanged segments are not redrawn. */
export interface Segment {
  round: Round;
  tokens: Token[];
  /** Index of its first token in the answer. */
  first: number;
}

/** A change of the fleet during the answer, before segment `at`. */
export interface Mark {
  at: number;
  text: string;
  gone: boolean;
}

export type Status = "waiting" | "away" | "streaming" | "resuming" | "done" | "stopped" | "failed";

export interface Failure {
  message: string;
  code: number | null;
  param: string | null;
}

/** Share of an answer's time by which two runs of it differ. */
export const NOISE = 0.05;
const RATE_WINDOW_S = 1;
const RATE_STEP_S = 0.1;
const RESUME_ATTEMPTS = 30;
const RESUME_PAUSE_MS = 1000;
/** A verifier loads its weights again for minutes at most. */
const MOST_RETURNS = 60;

export class Run {
  status: Status = "waiting";
  text = "";
  segments: Segment[] = [];
  marks: Mark[] = [];
  numTokens = 0;
  finishReason = "";
  failure: Failure | null = null;
  /** Of the whole answer, once it has ended. */
  speculation: Speculation | null = null;
  /** While "away": seconds until the request is sent again. */
  secondsLeft = 0;
  numReturns = 0;
  /** Id of the last event: the answer can be taken up after it. */
  lastId = "";
  /** Tokens per second over the last second, with the seconds since the first token. */
  rates: { atS: number; perS: number }[] = [];
  /** By the gateway's clock: the browser may get, or read, many events at once. */
  private arrivals: { atS: number; num: number }[] = [];
  private readonly parts = new Parts();
  private elapsedS = 0;
  private numTimed = 0;
  private lastServerS: number | null = null;

  constructor(readonly speculates: boolean) {}

  /** All that the answer came to, for a comparison. */
  get said(): string {
    const { reasoning, calls } = this.parts;
    return reasoning || calls.length > 0 ? JSON.stringify([reasoning, this.text, calls]) : this.text;
  }

  /** Neither reasoning nor a tool call. */
  get isTextOnly(): boolean {
    return this.parts.reasoning === "" && this.parts.calls.length === 0;
  }

  get calls(): readonly Call[] {
    return this.parts.calls;
  }

  get isOver(): boolean {
    return this.status === "done" || this.status === "stopped" || this.status === "failed";
  }

  /** The rounds with a draft. */
  get drafted(): Round[] {
    return this.segments.map((segment) => segment.round).filter((round) => round.num_draft_tokens > 0);
  }

  /** Tokens per round with a draft, as vLLM counts: the accepted ones plus the target's own. */
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

  /** From the first token to the last, without prompt processing. */
  get tokensPerS(): number | null {
    return this.elapsedS > 0 ? this.numTimed / this.elapsedS : null;
  }

  /** Milliseconds, estimated; 0 within the noise, negative if drafting has cost time; null while it is not known. */
  get savedMs(): number | null {
    if (!this.speculates || this.speculation === null) return null;
    const { num_spec_steps, saved_ms } = this.speculation;
    return num_spec_steps > 0 && Math.abs(saved_ms) > NOISE * 1000 * this.elapsedS ? saved_ms : 0;
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

  /** A connection begins, whose times are its own. */
  connected(): void {
    this.lastServerS = null;
  }

  /** serverS: see ServerEvent. */
  add(chunk: Chunk, serverS: number | null): void {
    this.speculation = chunk.metrics?.speculative_decoding ?? this.speculation;
    const choice = chunk.choices[0];
    if (choice === undefined) return; // the usage
    this.status = "streaming";
    this.text += choice.text ?? choice.delta?.content ?? "";
    if (choice.finish_reason !== null) this.finishReason = choice.finish_reason;
    const annotation = choice.outrider;
    const parts = choice.delta === undefined ? [] : this.parts.add(choice.delta, annotation?.token_texts ?? []);
    const round = annotation?.rounds[0];
    if (annotation === undefined || round === undefined || annotation.token_texts.length === 0) return;
    const laws = lawsOf(choice.logprobs);
    const tokens: Token[] = annotation.token_texts.map((text, index) => ({
      text,
      origin: annotation.origins[index] ?? "target",
      ...(laws[index] ?? { logprob: null, top: [] }),
      ...(parts[index] ?? { kind: "text", isMarkup: false }),
    }));
    this.append(round, tokens);
    if (serverS !== null) this.clock(tokens.length, serverS);
  }

  private append(round: Round, tokens: Token[]): void {
    const last = this.segments.at(-1);
    if (last !== undefined && last.round.index === round.index) {
      // The rest of a round that a resumption split.
      this.segments[this.segments.length - 1] = { ...last, tokens: [...last.tokens, ...tokens] };
    } else {
      this.segments.push({ round, tokens, first: this.numTokens });
    }
    this.numTokens += tokens.length;
  }

  private clock(num: number, serverS: number): void {
    // The first event of a connection brought its tokens before its time; what passed between two connections is unknown.
    if (this.lastServerS !== null) {
      this.elapsedS += serverS - this.lastServerS;
      this.numTimed += num;
      this.arrivals.push({ atS: this.elapsedS, num });
    }
    this.lastServerS = serverS;
    const atS = this.elapsedS;
    while ((this.arrivals[0]?.atS ?? atS) <= atS - RATE_WINDOW_S) this.arrivals.shift();
    const windowS = Math.min(RATE_WINDOW_S, atS);
    const last = this.rates.at(-1);
    if (windowS < 2 * RATE_STEP_S || (last !== undefined && atS - last.atS < RATE_STEP_S)) return;
    const inWindow = this.arrivals.reduce((sum, arrival) => sum + arrival.num, 0);
    this.rates.push({ atS, perS: inWindow / windowS });
  }
}

/** Runs a request to its end, or what follows the run's last event; resumes lost connections; never throws. */
export async function follow(run: Run, api: Api, path: string, body: object, signal: AbortSignal, changed: () => void): Promise<void> {
  let attemptsLeft = RESUME_ATTEMPTS;
  for (;;) {
    try {
      const stream = run.lastId ? api.resume(run.lastId, signal) : api.start(path, body, signal);
      run.connected();
      for await (const event of stream) {
        if (event.data === "[DONE]") {
          run.status = "done";
          return changed();
        }
        const chunk = JSON.parse(event.data) as Chunk | { error: ErrorDetail };
        if ("error" in chunk) throw new Refusal(chunk.error);
        run.lastId = event.id || run.lastId;
        attemptsLeft = RESUME_ATTEMPTS;
        run.add(chunk, event.serverS);
        changed();
      }
    } catch (error) {
      if (run.lastId === "" && (await comesBack(run, error, signal, changed))) continue;
      if (end(run, error, signal)) return changed();
    }
    if (run.lastId === "" || attemptsLeft === 0) {
      run.status = "failed";
      const message = run.lastId === "" ? "The gateway does not answer." : "The connection to the gateway was lost.";
      run.failure = { message, code: null, param: null };
      return changed();
    }
    attemptsLeft -= 1;
    run.status = "resuming";
    changed();
    await new Promise((resolve) => setTimeout(resolve, RESUME_PAUSE_MS));
  }
}

/** Waits, and shows how long, where no verifier serves now and the gateway says when to ask again. */
async function comesBack(run: Run, error: unknown, signal: AbortSignal, changed: () => void): Promise<boolean> {
  if (!(error instanceof Refusal) || error.detail.code !== 503 || !error.detail.retryAfterS) return false;
  if (run.numReturns >= MOST_RETURNS) return false;
  run.numReturns += 1;
  run.status = "away";
  for (run.secondsLeft = Math.ceil(error.detail.retryAfterS); run.secondsLeft > 0; run.secondsLeft -= 1) {
    if (signal.aborted) return false;
    changed();
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
  run.status = "waiting";
  changed();
  return true;
}

/** Whether this error ends the run; network failures do not. */
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
