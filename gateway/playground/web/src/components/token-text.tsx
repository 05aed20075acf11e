// An answer's text, token by token, with details on the token under the pointer or the arrow keys.

import { Component, Fragment } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Kind } from "../parts";
import type { Mark, Run, Segment, Token } from "../run";

const SLACK_PX = 24;

/** isPlain: no token is marked; the details on each are still there. */
export function TokenText({ run, label, isPlain }: { run: Run; label: string; isPlain: boolean }) {
  const [active, setActive] = useState<number | null>(null);
  const [said, setSaid] = useState("");
  const text = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  useEffect(() => setActive(null), [run]);
  useLayoutEffect(() => {
    if (text.current !== null && isAtEnd.current) text.current.scrollTop = text.current.scrollHeight;
  });

  const step = (to: number) => {
    const index = Math.max(0, Math.min(run.numTokens - 1, to));
    const found = run.tokenAt(index);
    if (found === null) return;
    setActive(index);
    setSaid(describe(found.token, found.segment, index));
    text.current?.querySelector(`[data-token="${index}"]`)?.scrollIntoView({ block: "nearest" });
  };
  const onKeyDown = (event: KeyboardEvent) => {
    const to = { ArrowRight: (active ?? -1) + 1, ArrowLeft: (active ?? 1) - 1, Home: 0, End: run.numTokens - 1 }[event.key];
    if (event.key === "Escape") setActive(null);
    if (to === undefined) return;
    event.preventDefault();
    step(to);
  };
  const onPointer = (event: PointerEvent) => {
    const index = (event.target as HTMLElement).closest<HTMLElement>("[data-token]")?.dataset.token;
    if (index !== undefined) setActive(Number(index));
  };
  const onPointerLeave = (event: PointerEvent) => {
    // A finger leaves right after tapping; its token stays selected.
    if (event.pointerType === "mouse") setActive(null);
  };
  const onScroll = (event: Event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget as HTMLElement;
    isAtEnd.current = scrollTop + clientHeight > scrollHeight - SLACK_PX;
  };
  const shown = active === null ? null : run.tokenAt(active);
  const isSpeaking = run.status === "streaming" || run.status === "resuming";
  return (
    <div class="token-text" onPointerLeave={onPointerLeave}>
      <div
        class={isPlain ? "text plain" : "text"}
        ref={text}
        tabIndex={0}
        role="group"
        aria-label={`${label}, tokens; use the arrow keys to move between them`}
        onKeyDown={onKeyDown}
        onPointerOver={onPointer}
        onBlur={() => setActive(null)}
        onScroll={onScroll}
      >
        {run.segments.map((segment, index) => (
          <SegmentView
            key={segment.first}
            segment={segment}
            before={run.segments[index - 1]?.tokens.at(-1)?.kind ?? "text"}
            marks={run.marks.filter((mark) => mark.at === index)}
            active={shown?.segment === segment ? active : null}
          />
        ))}
        {run.marks.filter((mark) => mark.at >= run.segments.length).map((mark) => <MarkView key={mark.text} mark={mark} />)}
        {isSpeaking && <span class="caret" aria-hidden="true" />}
      </div>
      {shown !== null && active !== null && <Card index={active} token={shown.token} segment={shown.segment} within={text} />}
      <p class="unseen" aria-live="polite">
        {said}
      </p>
    </div>
  );
}

interface SegmentProps {
  segment: Segment;
  /** The part of the token in front of it. */
  before: Kind;
  marks: Mark[];
  active: number | null;
}

class SegmentView extends Component<SegmentProps> {
  override shouldComponentUpdate(next: SegmentProps): boolean {
    const now = this.props;
    return next.segment !== now.segment || next.active !== now.active || next.marks.length !== now.marks.length;
  }

  override render({ segment, before, marks, active }: SegmentProps) {
    return (
      <>
        {marks.map((mark) => (
          <MarkView key={mark.text} mark={mark} />
        ))}
        <span class={active === null ? "round" : "round active"}>
          {segment.tokens.map((token, place) => {
            const index = segment.first + place;
            const blank = token.text.trim() === "" ? " blank" : "";
            const reasoned = token.kind === "reasoning" ? " reasoning" : "";
            const markup = token.isMarkup ? " markup" : "";
            const last = segment.tokens[place - 1]?.kind ?? before;
            return (
              <Fragment key={index}>
                {token.kind !== last && <span class="part">{PARTS[token.kind]}</span>}
                <span
                  data-token={index}
                  class={`token ${token.origin}${reasoned}${blank}${markup}${active === index ? " active" : ""}`}
                >
                  {token.text}
                </span>
              </Fragment>
            );
          })}
        </span>
      </>
    );
  }
}

function MarkView({ mark }: { mark: Mark }) {
  return (
    <span class={mark.gone ? "fleet-mark gone" : "fleet-mark"} role="note">
      {mark.text}
    </span>
  );
}

interface CardProps {
  index: number;
  token: Token;
  segment: Segment;
  within: { current: HTMLDivElement | null };
}

/** Below its token, or above it where only there is room in sight; within the width of the text. */
function Card({ index, token, segment, within }: CardProps) {
  const card = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => {
    const text = within.current;
    const anchor = text?.querySelector(`[data-token="${index}"]`)?.getClientRects()[0];
    if (card.current === null || !text || !anchor) return;
    const frame = text.getBoundingClientRect();
    const left = Math.min(anchor.left - frame.left, frame.width - card.current.offsetWidth - 8);
    card.current.style.left = `${Math.max(8, left)}px`;
    const view = text.closest(".answer")?.getBoundingClientRect();
    const height = card.current.offsetHeight + 6;
    const isAbove = view !== undefined && anchor.bottom + height > view.bottom && anchor.top - height >= view.top;
    card.current.style.top = `${(isAbove ? anchor.top - height : anchor.bottom + 6) - frame.top}px`;
  }, [index, token]);
  const { round } = segment;
  return (
    <div class="token-card" role="tooltip" ref={card}>
      <p class="row">
        <code>{visible(token.text)}</code>
        <span class={`token ${token.origin}`}>{NAMES[token.origin]}</span>
      </p>
      {token.logprob !== null && <Chances token={token} />}
      <dl>
        <dt>Token</dt>
        <dd>{index + 1}</dd>
        <dt>Round</dt>
        <dd>
          {round.index + 1}
          {round.num_draft_tokens > 0 ? `: ${round.num_accepted_tokens} of ${round.num_draft_tokens} accepted` : ": no draft"}
        </dd>
        {round.drafter && (
          <>
            <dt>Drafter</dt>
            <dd class="mono">{round.drafter}</dd>
          </>
        )}
        {round.method && (
          <>
            <dt>Method</dt>
            <dd class="mono">{round.method}</dd>
          </>
        )}
      </dl>
    </div>
  );
}

function Chances({ token }: { token: Token }) {
  const own = token.logprob ?? 0;
  const others = token.top.filter(([, logprob]) => logprob !== own).slice(0, 2);
  return (
    <ul class="chances" aria-label="Probabilities">
      {[[token.text, own] as const, ...others].map(([text, logprob], index) => (
        <li key={index} class={index === 0 ? "own" : ""}>
          <code>{visible(text)}</code>
          <svg viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">
            <rect width={100 * Math.exp(logprob)} height="4" rx="1" />
          </svg>
          <span>{percent(logprob)}</span>
        </li>
      ))}
    </ul>
  );
}

const PARTS: Record<Kind, string> = { reasoning: "Reasoning", text: "Text", call: "Tool call" };
const NAMES = { accepted: "accepted", corrected: "corrected", bonus: "bonus", target: "target" } as const;

function describe(token: Token, segment: Segment, index: number): string {
  const { round } = segment;
  const chance = token.logprob === null ? "" : `, probability ${percent(token.logprob)}`;
  const drafter = round.drafter ? `, drafted by ${round.method} at ${round.drafter}` : ", no draft";
  return `Token ${index + 1}, ${visible(token.text)}: ${NAMES[token.origin]}${chance}, round ${round.index + 1}${drafter}`;
}

function percent(logprob: number): string {
  const chance = 100 * Math.exp(logprob);
  return `${chance >= 99.95 ? "100" : chance >= 10 ? chance.toFixed(0) : chance.toFixed(1)} %`;
}

function visible(text: string): string {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "(unfinished)";
}
