import type { Run } from "../run";
import type { Runs } from "../use-runs";
import type { Origin } from "../wire";
import { TokenText } from "./token-text";
import { Verdict } from "./verdict";

export function Answer({ runs }: { runs: Runs }) {
  const { main, plain, history } = runs;
  return (
    <section class="answer card" aria-label="Answer">
      {history.map((turn, place) => (
        <p key={place} class={`turn ${turn.role}`}>
          <span class="who">{turn.role === "user" ? "You" : "Model"}</span>
          <span class="said">{turn.content}</span>
        </p>
      ))}
      {main === null ? (
        <Empty />
      ) : (
        <>
          <div class={plain === null ? "panels" : "panels two"}>
            <Panel run={main} title={plain === null ? "Answer" : "Speculation on"} />
            {plain !== null && <Panel run={plain} title="Speculation off" />}
          </div>
          {plain !== null && <Verdict main={main} plain={plain} mustAgree={runs.mustAgree} />}
        </>
      )}
      <Legend run={main} />
    </section>
  );
}

function Empty() {
  return (
    <div class="empty">
      <h2>Nothing asked yet</h2>
      <p>
        Run a prompt, and every token of the answer shows where it came from: guessed by a drafter and accepted, put
        right by the target, or said by the target alone.
      </p>
    </div>
  );
}

function Panel({ run, title }: { run: Run; title: string }) {
  return (
    <article class="panel" aria-label={title} aria-busy={!run.isOver}>
      <div class="row">
        <h2>{title}</h2>
        <p class="figures">
          <b>{run.numTokens}</b> tokens
          {run.tokensPerS !== null && (
            <>
              , <b>{run.tokensPerS.toFixed(0)}</b> a second
            </>
          )}
        </p>
      </div>
      {(run.numTokens > 0 || !run.isOver) && <TokenText run={run} label={title} />}
      {run.failure !== null && (
        <p class="failure" role="alert">
          <b>{run.failure.code === null ? "Broken off." : `Refused with ${run.failure.code}.`}</b> {run.failure.message}
        </p>
      )}
      <p class="state" role="status">
        {stateOf(run)}
      </p>
    </article>
  );
}

function stateOf(run: Run): string {
  switch (run.status) {
    case "waiting":
      return "Waiting for the first token…";
    case "streaming":
      return "Writing…";
    case "resuming":
      return "The connection broke. Taking the stream up again…";
    case "stopped":
      return "Stopped.";
    case "failed":
      return "";
    case "done":
      return run.finishReason === "length" ? "Done: the limit of tokens is reached." : "Done: the model has ended.";
  }
}

const ORIGINS: readonly { origin: Origin; name: string; meaning: string }[] = [
  { origin: "accepted", name: "accepted", meaning: "drafted, and the target agreed" },
  { origin: "corrected", name: "corrected", meaning: "drafted wrong, replaced by the target" },
  { origin: "bonus", name: "bonus", meaning: "the target's own, after a whole draft was good" },
  { origin: "target", name: "target", meaning: "nothing was drafted here" },
];

function Legend({ run }: { run: Run | null }) {
  return (
    <ul class="legend" aria-label="Where tokens come from">
      {ORIGINS.map(({ origin, name, meaning }) => (
        <li key={origin}>
          <span class={`token ${origin}`}>{name}</span> {run !== null && <b>{run.count(origin)}</b>}{" "}
          <span class="quiet">{meaning}</span>
        </li>
      ))}
    </ul>
  );
}
