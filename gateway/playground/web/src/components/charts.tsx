// Live charts of speculation, round by round.

import type { ComponentChildren } from "preact";
import type { Run } from "../run";
import type { Origin, Round } from "../wire";
import { Line } from "./line";

/** Rounds shown, the newest ones; as many as fit a wide or a narrow screen. */
const NUM_ROUNDS = { wide: 48, narrow: 24 };
const WIDE = "(min-width: 44rem)";
/** Rounds averaged per point of the length charts. */
const SMOOTHING = 8;

export function Charts({ main, plain }: { main: Run | null; plain: Run | null }) {
  const rounds = main?.drafted ?? [];
  return (
    <section class="charts" aria-label="Speculation">
      <RoundChart run={main} />
      <Figure name="Acceptance length" unit="tokens per round" value={main?.acceptanceLength ?? null} digits={2}>
        <Line lines={[smoothed(rounds, (round) => 1 + round.num_accepted_tokens)]} floor={0} />
      </Figure>
      <Figure name="Draft length" unit="tokens per draft" value={main?.draftLength ?? null} digits={2}>
        <Line lines={[smoothed(rounds, (round) => round.num_draft_tokens)]} floor={0} />
      </Figure>
      <Figure
        name="Speed"
        unit={plain === null ? "tokens per second" : "tokens per second; dashed: off"}
        value={main?.tokensPerS ?? null}
        digits={0}
      >
        <Line lines={[ratesOf(main), ratesOf(plain)]} floor={0} />
      </Figure>
    </section>
  );
}

interface FigureProps {
  name: string;
  unit: string;
  value: number | null;
  digits: number;
  children: ComponentChildren;
}

function Figure({ name, unit, value, digits, children }: FigureProps) {
  return (
    <figure class="card">
      <figcaption>
        <h2>{name}</h2>
        <p>
          <b>{value === null ? "–" : value.toFixed(digits)}</b> <span class="quiet">{unit}</span>
        </p>
      </figcaption>
      {children}
    </figure>
  );
}

function smoothed(rounds: Round[], valueOf: (round: Round) => number): [number, number][] {
  return rounds.map((_, index) => {
    const recent = rounds.slice(Math.max(0, index + 1 - SMOOTHING), index + 1);
    return [index, recent.reduce((sum, round) => sum + valueOf(round), 0) / recent.length];
  });
}

function ratesOf(run: Run | null): [number, number][] {
  return run === null ? [] : run.rates.map(({ atS, perS }) => [atS, perS]);
}

const CELL = 10;
const GAP = 2;
const ROWS = 6;

/** One column per round: draft tokens, how many were accepted, and the target's own token on top. */
function RoundChart({ run }: { run: Run | null }) {
  const numRounds = matchMedia(WIDE).matches ? NUM_ROUNDS.wide : NUM_ROUNDS.narrow;
  const segments = run?.segments.slice(-numRounds) ?? [];
  const rows = Math.max(ROWS, ...segments.map((segment) => segment.round.num_draft_tokens + 1));
  const height = rows * CELL;
  return (
    <figure class="card rounds">
      <figcaption>
        <h2>Rounds</h2>
        <p class="quiet">
          {segments.length === 0 ? "one column per round" : `the last ${segments.length}; hollow: rejected draft tokens`}
        </p>
      </figcaption>
      <svg viewBox={`0 0 ${numRounds * CELL} ${height}`} role="img" aria-label={summaryOf(run)}>
        {segments.map(({ round, tokens }, index) => {
          const top = tokens.at(-1)?.origin ?? "target";
          return <Column key={round.index} x={index * CELL} bottom={height} round={round} top={top} />;
        })}
      </svg>
    </figure>
  );
}

function Column({ x, bottom, round, top }: { x: number; bottom: number; round: Round; top: Origin }) {
  const cells = [];
  const numShown = Math.max(round.num_draft_tokens, round.num_accepted_tokens);
  for (let position = 0; position < numShown; position++) {
    const isAccepted = position < round.num_accepted_tokens;
    // The target's own token replaces the first rejected one.
    if (position === round.num_accepted_tokens && top === "corrected") continue;
    cells.push(<Cell key={position} kind={isAccepted ? "accepted" : "dropped"} x={x} y={bottom - (position + 1) * CELL} />);
  }
  const isOwn = top !== "accepted";
  if (isOwn) cells.push(<Cell key="own" kind={top} x={x} y={bottom - (round.num_accepted_tokens + 1) * CELL} />);
  return <g>{cells}</g>;
}

/** Each kind has its own shape, so that none depends on colour. */
function Cell({ kind, x, y }: { kind: Origin | "dropped"; x: number; y: number }) {
  const side = CELL - GAP;
  switch (kind) {
    case "bonus":
      return <circle class={kind} cx={x + side / 2} cy={y + GAP / 2 + side / 2} r={side / 2} />;
    case "corrected":
      return <path class={kind} d={`M${x} ${y + GAP / 2}l${side} ${side}m0 ${-side}l${-side} ${side}`} />;
    case "target":
      return <rect class={kind} x={x} y={y + side - 2} width={side} height="3" />;
    default:
      return <rect class={kind} x={x + 0.5} y={y + GAP / 2 + 0.5} width={side - 1} height={side - 1} rx="1.5" />;
  }
}

function summaryOf(run: Run | null): string {
  if (run === null || run.segments.length === 0) return "No rounds yet";
  const drafted = run.drafted;
  const numAccepted = drafted.reduce((sum, round) => sum + round.num_accepted_tokens, 0);
  const numDrafted = drafted.reduce((sum, round) => sum + round.num_draft_tokens, 0);
  return `${run.segments.length} rounds, ${drafted.length} with a draft; ${numAccepted} of ${numDrafted} draft tokens accepted`;
}
