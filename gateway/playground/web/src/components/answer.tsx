import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Failure, Run } from "../run";
import { EXAMPLES, QUESTIONS, type Settings } from "../settings";
import type { Runs } from "../use-runs";
import { Markdown } from "./markdown";
import { TokenText } from "./token-text";
import { Verdict } from "./verdict";

const SLACK_PX = 48;

interface Props {
  runs: Runs;
  settings: Settings;
  change: (part: Partial<Settings>) => void;
  /** See FleetState. */
  secondsLeft: number | null;
}

/** The turns and the newest answer, which stays in sight while it grows unless the reader scrolls away. */
export function Answer({ runs, settings, change, secondsLeft }: Props) {
  const { main, plain, history } = runs;
  const isChat = settings.kind === "chat";
  const hasMarks = settings.marks[settings.kind];
  const view = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  useLayoutEffect(() => {
    if (view.current !== null && isAtEnd.current) view.current.scrollTop = view.current.scrollHeight;
  });
  // A new question is looked at, wherever the reader was.
  useLayoutEffect(() => {
    isAtEnd.current = true;
  }, [main]);
  const onScroll = (event: Event) => {
    const { scrollTop, scrollHeight, clientHeight } = event.currentTarget as HTMLElement;
    isAtEnd.current = scrollTop + clientHeight > scrollHeight - SLACK_PX;
  };
  const panel = (run: Run, title: string) => (
    <Panel
      run={run}
      title={title}
      goOn={runs.goOn}
      isRendered={isChat && !hasMarks}
      again={plain === null ? runs.again : null}
      secondsLeft={secondsLeft}
    />
  );
  return (
    <div class="answer" ref={view} onScroll={onScroll} tabIndex={0} role="region" aria-label="Answer">
      {history.map((turn, index) => (
        <div key={index} class={`turn ${turn.role}`}>
          <span class="unseen">{turn.role === "user" ? "You" : "Model"}</span>
          {turn.role === "user" ? <p class="said">{turn.content}</p> : <Markdown text={turn.content} />}
          {turn.role === "user" && !runs.isRunning && (
            <button type="button" class="link" onClick={() => change({ message: runs.takeBack(index) })}>
              Edit
            </button>
          )}
        </div>
      ))}
      {main === null ? (
        history.length === 0 && <Empty isChat={isChat} choose={(text) => change(isChat ? { message: text } : { prompt: text })} />
      ) : (
        <>
          <div class={plain === null ? "panels" : "panels two"} onScrollCapture={plain === null ? undefined : scrollTogether}>
            {panel(main, plain === null ? "Answer" : "Speculation on")}
            {plain !== null && panel(plain, "Speculation off")}
          </div>
          {plain !== null && <Verdict main={main} plain={plain} mustAgree={runs.mustAgree} />}
          {hasMarks && main.numTokens > 0 && <Legend run={main} />}
        </>
      )}
    </div>
  );
}

/** The other pane of a comparison follows the one that is scrolled. */
function scrollTogether(event: Event): void {
  const from = event.target as HTMLElement;
  if (!from.matches(".text, .rendered")) return;
  for (const pane of (event.currentTarget as HTMLElement).querySelectorAll<HTMLElement>(".text, .rendered")) {
    if (pane !== from && pane.scrollTop !== from.scrollTop) pane.scrollTop = from.scrollTop;
  }
}

function Empty({ isChat, choose }: { isChat: boolean; choose: (text: string) => void }) {
  return (
    <div class="empty">
      <h2>{isChat ? "Ask something" : "Give a text to continue"}</h2>
      <p>
        Outrider drafts several tokens ahead and lets the model check them in one pass: the answer is the model's own,
        only sooner. Switch the marks on to see which tokens were drafted, or compare with speculation off.
      </p>
      <p class="examples">
        {(isChat ? QUESTIONS : EXAMPLES).map((example) => (
          <button key={example.name} type="button" onClick={() => choose(example.text)}>
            {example.name}
          </button>
        ))}
      </p>
    </div>
  );
}

interface PanelProps {
  run: Run;
  title: string;
  goOn: Runs["goOn"];
  /** As Markdown, without where its tokens come from. */
  isRendered: boolean;
  again: (() => void) | null;
  secondsLeft: number | null;
}

function Panel({ run, title, goOn, isRendered, again, secondsLeft }: PanelProps) {
  // Reasoning and tool calls are drawn token by token.
  const asMarkdown = isRendered && run.isTextOnly;
  const failure = useRef<HTMLDivElement>(null);
  useLayoutEffect(() => failure.current?.scrollIntoView({ block: "nearest" }), [run.failure]);
  return (
    <article class="panel" aria-label={title} aria-busy={!run.isOver}>
      <div class="row">
        <h2>{title}</h2>
        <p class="figures">
          {run.numTokens > 0 && (
            <>
              <b>{run.numTokens}</b> {run.numTokens === 1 ? "token" : "tokens"}
            </>
          )}
          {run.tokensPerS !== null && (
            <>
              , <b>{run.tokensPerS.toFixed(0)}</b> per second
            </>
          )}
          {run.savedMs !== null && <>; {savedInWords(run.savedMs)}</>}
        </p>
      </div>
      {asMarkdown && run.text !== "" && (
        <div class="rendered" tabIndex={0} role="group" aria-label={`${title}, text`}>
          <Markdown text={run.text} />
        </div>
      )}
      {!asMarkdown && (run.numTokens > 0 || !run.isOver) && <TokenText run={run} label={title} isPlain={isRendered} />}
      {run.calls.length > 0 && (
        <ul class="calls" aria-label="Tool calls">
          {run.calls.map((call, index) => (
            <li key={index}>
              <b>{call.name}</b> <code>{call.arguments}</code>
            </li>
          ))}
        </ul>
      )}
      {run.failure !== null && (
        <div class="failure row" role="alert" ref={failure}>
          <p>
            <b>{inWords(run.failure)}</b> {run.failure.message}
          </p>
          {run.lastId && (
            <button type="button" onClick={() => goOn(run)}>
              Continue after token {run.numTokens}
            </button>
          )}
        </div>
      )}
      <div class="row">
        <p class="state" role="status">
          {secondsLeft !== null && !run.isOver && run.status !== "away"
            ? `Waiting for a verifier to come back: ${secondsLeft} s left…`
            : stateOf(run)}
        </p>
        {run.isOver && run.numTokens > 0 && (
          <p class="acts">
            {run.text !== "" && <Copy text={run.text} />}
            {again !== null && (
              <button type="button" class="link" onClick={again}>
                Regenerate
              </button>
            )}
          </p>
        )}
      </div>
    </article>
  );
}

function savedInWords(savedMs: number): string {
  if (savedMs === 0) return "speculation saved nothing here";
  const ms = Math.abs(savedMs);
  // An estimate: two digits are what it is good for.
  const amount = ms < 1000 ? `${Number(ms.toPrecision(2))} ms` : `${(ms / 1000).toFixed(1)} s`;
  return `speculation ${savedMs > 0 ? "saved" : "cost"} about ${amount}`;
}

function Copy({ text }: { text: string }) {
  const [said, setSaid] = useState("Copy");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text); // only in secure contexts: https or this machine
      setSaid("Copied");
    } catch {
      setSaid("Not allowed here");
    }
    setTimeout(() => setSaid("Copy"), 1500);
  };
  return (
    <button type="button" class="link" onClick={() => void copy()}>
      {said}
    </button>
  );
}

/** What an HTTP status means to whoever reads the page. */
const WORDS: Record<number, string> = {
  401: "This gateway needs a valid API key.",
  404: "The gateway does not know this, or not any more.",
  408: "The connection was too slow.",
  409: "Another connection has taken over this answer.",
  413: "The request is too large.",
  429: "Too many requests at the moment; try again soon.",
  500: "Something failed in the gateway.",
  503: "The service is not available at the moment.",
  504: "The time limit has passed.",
};

function inWords({ code }: Failure): string {
  if (code === null) return "The connection was lost.";
  return WORDS[code] ?? "The request was refused.";
}

function stateOf(run: Run): string {
  switch (run.status) {
    case "waiting":
      return "Waiting for the first token…";
    case "away":
      return `The model is not available at the moment. Asking again in ${run.secondsLeft} s…`;
    case "streaming":
      return "Generating…";
    case "resuming":
      return "The connection was lost. Resuming…";
    case "stopped":
      return "Stopped.";
    case "failed":
      return "";
    case "done":
      if (run.finishReason === "tool_calls") return "Done: the model calls tools.";
      return run.finishReason === "length" ? "Done: token limit reached." : "Done: the model ended its answer.";
  }
}

/** Accepted tokens are what was gained; all others are the target's own, with a draft or without. */
function Legend({ run }: { run: Run }) {
  const accepted = run.count("accepted");
  return (
    <ul class="legend" aria-label="Where tokens come from">
      <li>
        <span class="token accepted">accepted</span> <b>{accepted}</b>{" "}
        <span class="quiet">drafted, and confirmed by the model</span>
      </li>
      <li>
        <span class="token target">the model's own</span> <b>{run.numTokens - accepted}</b>
      </li>
    </ul>
  );
}
